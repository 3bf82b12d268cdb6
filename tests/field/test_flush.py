"""A run's end does not wait for answers that cannot come.

A pull of the flush may cross an adoption: its learner then has no steps to
tell of, and takes none any more.
"""

import contextlib
import dataclasses

import pytest

from ddiloco_jax.launch.relay import Relay
from ddiloco_jax.learner.link import Link
from ddiloco_jax.protocol import events, tape
from ddiloco_jax.protocol.events import Counts
from ddiloco_jax.wire import port
from tests.protocol.by_hand import FOUR, Hand
from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.served import wait_for


def before_the_flush(quorum: int, *, asked: bool = False) -> Hand:
  """A version is published; bob had no part in it, and has not applied it.

  Bob's steps since an older base make it a member of the next round, if it was
  not asked already for this one.
  """
  hand = Hand(dataclasses.replace(FOUR, quorum=quorum))
  others = ("ada", "cyd")[:quorum]
  early = ("bob", *others) if asked else others
  for name in early:
    hand.join(name)
  hand.until_asked(early)
  if not asked:
    hand.join("bob")
    hand.report("bob")
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


def test_the_flush_waits_for_a_carried_reply_only_while_it_can_come():
  hand = before_the_flush(1, asked=True)
  hand.apply("ada")
  hand.tell(events.StopRequested(reason="enough"))
  assert not hand.state.rounds

  hand.apply("bob")

  assert [e.fragment for e in hand.of(events.Publish) if e.exact] == [0]


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


def test_a_flush_is_answered_from_the_last_boundary_alone(tmp_path):
  # The end comes while only the boundary before has a copy; it must neither
  # answer nor end the link.
  cfg = settings(cycle_steps=1000)
  with served_run(cfg, tmp_path / "run") as run:
    link = Link(run.syncer, "ada")
    (position,) = link.start().positions
    fresh = {p.fragment: p for p in link.published()}
    for publication in fresh.values():
      link.adopted(publication, 0, Counts())

    def copies(steps: int) -> dict[int, port.Copy]:
      return {
        p: port.Copy(
          arrays={k: x + steps for k, x in publication.arrays.items()},
          base=publication.arrays,
          base_version=publication.version,
          counts=Counts(steps, 100 * steps),
          lr_sum=0.1 * steps,
          positions=(position,),
        )
        for p, publication in fresh.items()
      }

    def report(steps: int) -> None:
      counts = (Counts(steps, 100 * steps),) * 2
      link.report(events.Reported(step=steps, counts=counts))

    report(1)
    link.offer(copies(1))
    link.offer({})
    run.request_stop()
    wait_for(lambda: link.ending() and link._shared.pulls)
    link.wait(0.3)  # Raises what has ended the link.
    report(2)
    link.offer(copies(2))
    while not link.finished():
      link.wait(1.0)
      for publication in link.published():
        link.adopted(publication, 2, Counts())
    link.leave("the run has ended")

  replies = [
    line.event
    for line in tape.Reader(tmp_path / "run" / "tape.jsonl").lines()
    if isinstance(line.event, events.Replied)
  ]
  assert {reply.fragment for reply in replies} == {0, 1}
  assert {reply.counts.steps for reply in replies} == {2}


def test_a_learner_that_missed_the_end_is_told_of_it(tmp_path):
  cfg = settings(quorum=1, acknowledge_s=1.0)
  with (
    served_run(cfg, tmp_path / "run") as run,
    contextlib.closing(Relay(run.address)) as proxy,
  ):
    ada = LoopLearner(proxy.address, "ada", paced(0.03))
    with learners(ada):
      wait_for(lambda: ada.steps)
      proxy.redirect("127.0.0.1:9")  # Nobody is there.
      proxy.cut()
      run.request_stop("enough")
      assert run.wait().missing in ((), ("ada",))
      assert ada.error is None
      assert ada.reason is None

      proxy.redirect(run.address)

      assert ada.end().startswith("stop_requested: enough")
