"""Impossible messages are refused at the edge, with the rule and the fix."""

import pytest

from ddiloco_jax.protocol import events, machine
from ddiloco_jax.protocol.check import MAX_STEP_TOKENS, check
from ddiloco_jax.protocol.events import Counts, Position, Version
from ddiloco_jax.protocol.rules import Rules
from tests.protocol.by_hand import Hand

RULES = Rules(num_fragments=2, cycle_steps=4, num_shards=8)


@pytest.fixture
def hand() -> Hand:
  hand = Hand(RULES)
  hand.join("L0")
  hand.report("L0", 3)
  return hand


def report(hand: Hand, **more) -> events.Reported:
  fields = {
    **hand.where("L0"),
    "step": hand.steps["L0"],
    "counts": tuple(hand.counts["L0"]),
    **more,
  }
  return events.Reported(**fields)


def test_an_honest_report_passes(hand):
  check(hand.state, report(hand))
  check(hand.state, report(hand, step=4, positions=(Position(7, 3),)))


@pytest.mark.parametrize(
  ("change", "word"),
  [
    ({"step": 2}, "never go back"),
    ({"step": -1}, "0..2"),
    ({"counts": (Counts(3, 300),)}, "one per fragment"),
    ({"counts": (Counts(2, 300), Counts(3, 300))}, "only grow"),
    ({"counts": (Counts(3, 299), Counts(3, 300))}, "only grow"),
    ({"counts": (Counts(3, -1), Counts(3, 300))}, "-1"),
    ({"counts": (Counts(3, 2**53 + 1), Counts(3, 300))}, "2\\*\\*53"),
    ({"positions": (Position(8, 0),)}, "shard 8"),
    ({"boundaries": ((2, 1),)}, "fragment 2"),
    ({"boundaries": ((0, 1), (0, 1))}, "fragment 0 twice"),
    ({"positions": (Position(1, 0), Position(1, 0))}, "shard 1 twice"),
    ({"returned": (Position(1, 0), Position(1, 0))}, "shard 1 twice"),
  ],
)
def test_impossible_reports_are_refused(hand, change, word):
  with pytest.raises(ValueError, match=word):
    check(hand.state, report(hand, **change))


def words_about(hand: Hand, counts: Counts) -> tuple[events.Event, ...]:
  """A report, an adoption and a reply of the same counts of fragment 0."""
  where = hand.where("L0")
  newest = Version(1, 0)
  return (
    report(hand, step=4, counts=(counts, Counts(3, 300))),
    events.Applied(**where, fragment=0, version=newest, step=4, counts=counts),
    events.Replied(
      **where,
      fragment=0,
      round=1,
      attempt=0,
      base=newest,
      counts=counts,
      norm=1.0,
    ),
  )


def test_no_step_has_an_absurd_number_of_tokens(hand):
  for word in words_about(hand, Counts(4, 4 * MAX_STEP_TOKENS)):
    check(hand.state, word)

  for word in words_about(hand, Counts(4, 4 * MAX_STEP_TOKENS + 1)):
    with pytest.raises(
      ValueError,
      match=r"17179869185 tokens in 4 steps.*2\*\*32.*count the loss",
    ):
      check(hand.state, word)
  for word in words_about(hand, Counts(4, 2**52)):
    with pytest.raises(ValueError, match=f"{2**52} tokens in 4 steps"):
      check(hand.state, word)


def test_counts_may_start_again_after_an_adoption(hand):
  hand.apply("L0", 0)

  check(hand.state, report(hand, counts=(Counts(0, 0), Counts(3, 300))))


@pytest.mark.parametrize(
  ("change", "word"),
  [
    ({"fragment": 2}, "fragment 2"),
    ({"counts": Counts(-1, 0)}, "-1"),
    ({"lr_sum": float("nan")}, "lr_sum"),
    ({"norm": -1.0}, "negative"),
    ({"base": Version(1, -1)}, "negative"),
    ({"round": -1}, "round"),
  ],
)
def test_impossible_replies_are_refused(hand, change, word):
  fields = {
    **hand.where("L0"),
    "fragment": 0,
    "round": 1,
    "attempt": 0,
    "base": Version(1, 0),
    "counts": Counts(3, 300),
    "norm": float("nan"),
  }
  check(hand.state, events.Replied(**fields))

  with pytest.raises(ValueError, match=word):
    check(hand.state, events.Replied(**{**fields, **change}))


def test_a_version_that_was_never_published_cannot_be_applied(hand):
  event = events.Applied(
    **hand.where("L0"), fragment=0, version=Version(1, 5), step=3
  )

  with pytest.raises(ValueError, match="never published"):
    check(hand.state, event)


def test_a_hello_needs_a_name_and_bases_of_this_run(hand):
  with pytest.raises(ValueError, match="may be empty"):
    check(hand.state, events.Joined(learner="", nonce="n"))
  few = events.Joined(learner="L1", nonce="n", bases=(Version(1, 0),))
  with pytest.raises(ValueError, match="1 bases for 2"):
    check(hand.state, few)
  later = events.Joined(learner="L1", nonce="n", bases=(Version(9, 0),) * 2)
  with pytest.raises(ValueError, match="epoch 9"):
    check(hand.state, later)


@pytest.mark.parametrize(
  ("change", "word"),
  [
    ({"num_fragments": 25}, "num_fragments"),
    ({"num_fragments": 0}, "num_fragments"),
    ({"quorum": 0}, "quorum"),
    ({"quorum": 65}, "max_learners"),
    ({"quorum_timeout_s": 1.0}, "quorum_timeout_s 1.0 < lease_s 15.0"),
    ({"members": "all"}, "members"),
    ({"fragment_params": (1, 2)}, "fragment_params"),
    ({"stale": "maybe"}, "stale"),
  ],
)
def test_rules_that_contradict_each_other_are_refused(change, word):
  with pytest.raises(ValueError, match=word):
    machine.initial(Rules(**change))
