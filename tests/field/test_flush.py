"""A run's end does not wait for answers that cannot come.

A pull of the flush may cross an adoption: its learner then has no steps to
tell of, and takes none any more.
"""

import dataclasses

import pytest

from ddiloco_jax.protocol import events
from tests.protocol.by_hand import FOUR, Hand


def before_the_flush(quorum: int) -> Hand:
  """A version is published; bob had no part in it, and has not applied it.

  Bob's steps since an older base make it a member of the next round.
  """
  hand = Hand(dataclasses.replace(FOUR, quorum=quorum))
  others = ("ada", "cyd")[:quorum]
  for name in ("bob", *others):
    hand.join(name)
  hand.until_asked(("bob", *others))
  for name in others:
    hand.reply(name)
  for r in hand.state.rounds:
    hand.tick(max(0.0, r.grace_end - hand.now))
  hand.merged()
  for name in others[1:]:
    hand.tell(events.Left(**hand.where(name)))
  return hand


def stop(hand: Hand) -> int:
  """Asks the run to end: merges so far."""
  hand.tell(events.StopRequested(reason="enough"))
  (r,) = hand.state.rounds
  assert r.flush
  assert "bob" in {member.learner for member in r.waiting}
  return len(hand.of(events.Merge))


def test_the_flush_ends_once_nobody_is_left_who_could_answer():
  hand = before_the_flush(1)
  hand.apply("ada")
  stop(hand)

  hand.apply("bob")

  assert [e.fragment for e in hand.of(events.Publish) if e.exact] == [0]
  hand.apply("ada", exact=True)
  hand.apply("bob", exact=True)
  assert len(hand.of(events.Finished)) == 1


@pytest.mark.parametrize("first", ["reply", "adoption"])
def test_the_flush_merges_what_the_others_answer(first):
  hand = before_the_flush(2)
  hand.apply("ada")
  hand.report("ada")
  merges = stop(hand)

  if first == "reply":
    hand.reply("ada")
    hand.apply("bob")
  else:
    hand.apply("bob")
    hand.reply("ada")

  (merge,) = hand.of(events.Merge)[merges:]
  assert [item.key.learner for item in merge.inputs] == ["ada"]


def test_an_answer_under_way_is_waited_for():
  hand = before_the_flush(2)
  hand.apply("ada")
  hand.report("ada")
  base, counts = hand.bases["bob"][0], hand.counts["bob"][0]
  merges = stop(hand)

  hand.push("bob", 0)
  hand.apply("bob")
  hand.reply("ada")
  assert not hand.of(events.Merge)[merges:]
  hand.reply("bob", base=base, counts=counts)

  assert len(hand.of(events.Merge)[merges:]) == 1


def test_before_the_end_an_adoption_excuses_nobody():
  # The next step has an answer.
  hand = before_the_flush(1)
  hand.apply("ada")
  hand.until_asked(("ada",))
  (r,) = hand.state.rounds

  hand.apply("bob")

  assert hand.state.rounds == (r,)
