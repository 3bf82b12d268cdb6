"""Counts and positions that cannot be: refused, whatever order words come in."""

import pytest

from ddiloco_jax.protocol import events, machine
from ddiloco_jax.protocol.check import check
from ddiloco_jax.protocol.events import Counts, Outcome, Position, Version
from ddiloco_jax.protocol.rules import Rules
from tests.protocol.by_hand import Hand, only

RULES = Rules(num_fragments=1, cycle_steps=4, quorum=2)
FAR = 2**40


@pytest.fixture
def hand() -> Hand:
  """Two learners of 100 tokens a step, asked for a reply after four."""
  hand = Hand(RULES)
  for name in ("L0", "L1"):
    hand.join(name)
  for batch in range(1, 5):
    hand.now += 1.0
    hand.report("L0", positions=(Position(0, batch),))
    hand.report("L1", positions=(Position(1, batch),))
  assert hand.state.learners["L0"].asked
  return hand


def report(hand: Hand, **more) -> events.Reported:
  fields = {
    "step": 5,
    "counts": (Counts(5, 500),),
    "positions": (Position(0, 5),),
    **more,
  }
  return events.Reported(**hand.where("L0"), **fields)


@pytest.mark.parametrize(
  ("change", "word"),
  [
    ({"counts": (Counts(6, 600),)}, "at most 5 can be"),
    ({"counts": (Counts(4, 401),), "step": 4}, "only a step adds tokens"),
    ({"positions": (Position(0, 3),)}, "position 3 of data shard 0"),
    ({"positions": (Position(0, 6),)}, "lies in 4..5"),
    ({"positions": (Position(7, 6),)}, "position 6 of data shard 7"),
    ({"positions": (), "returned": (Position(0, 3),)}, "lies in 4..5"),
    ({"positions": (), "returned": (Position(0, FAR),)}, "lies in 4..5"),
    ({"step": FAR}, "can have been taken"),
  ],
)
def test_a_report_that_outgrows_the_ones_before_is_refused(hand, change, word):
  check(hand.state, report(hand))

  with pytest.raises(ValueError, match=word):
    check(hand.state, report(hand, **change))


def test_a_shard_that_was_given_up_before_is_said_for_ever(hand):
  given_up = (Position(0, 5), Position(1, 2))

  check(hand.state, report(hand, positions=(), returned=given_up))
  hand.report("L0", positions=())

  check(hand.state, report(hand, step=9, positions=(), returned=given_up))


def test_counts_since_an_adoption_do_not_reach_behind_it(hand):
  hand.apply("L0")

  check(hand.state, report(hand, counts=(Counts(1, 100),)))
  with pytest.raises(ValueError, match="which was at step 4"):
    check(hand.state, report(hand, counts=(Counts(2, 200),)))


@pytest.mark.parametrize("counts", [Counts(5, 500), Counts(4, 401)])
def test_an_adoption_resets_no_more_than_was_counted(hand, counts):
  fields = {**hand.where("L0"), "fragment": 0, "version": Version(1, 0)}
  check(hand.state, events.Applied(**fields, step=4, counts=Counts(4, 400)))

  with pytest.raises(ValueError, match="adoption by 'L0'"):
    check(hand.state, events.Applied(**fields, step=4, counts=counts))


def test_after_a_restart_what_was_not_heard_is_no_fault(hand):
  # It went on alone: the restored syncer knows only where it was.
  hand.state = machine.restore(RULES, machine.save(hand.state))
  hand.tell(
    events.Joined(learner="L0", nonce="L0-0", bases=tuple(hand.bases["L0"]))
  )

  change = {
    "step": 10**7,
    "counts": (Counts(10**7, 10**9),),
    "positions": (Position(0, 10**7),),
  }
  check(hand.state, report(hand, **change))
  hand.tell(report(hand, **change))
  with pytest.raises(ValueError, match="position"):
    check(hand.state, report(hand, **{**change, "positions": ((0, 4),)}))


@pytest.mark.parametrize(
  ("change", "word"),
  [
    ({"counts": Counts(4, 401)}, "401 tokens in 4 steps"),
    ({"counts": Counts(4, FAR)}, "so 400 is the bound"),
    ({"counts": Counts(5, FAR)}, "at most 100 a step"),
    ({"counts": Counts(FAR, FAR)}, "more than its reports"),
    ({"counts": Counts(3000, 300_000)}, "which came to step 4"),
    ({"positions": (Position(0, 6),)}, "position 6 of data shard 0"),
    ({"positions": (Position(0, FAR),)}, "beyond 4"),
    ({"base": Version(1, 7), "counts": Counts(1, FAR)}, "tokens in 1 steps"),
  ],
)
def test_a_reply_that_outgrows_the_reports_is_refused_and_told(
  hand, change, word
):
  effects = hand.reply("L0", **change)

  resolved = only(effects, events.Resolved)
  assert resolved.outcome is Outcome.REFUSED
  assert resolved.reason.startswith("counters: ")
  assert word in resolved.reason
  assert hand.state.counters["refused/counters"] == 1
  assert hand.state.accepted.get(0, 0) == 0
  hand.reply("L1")
  hand.tick(RULES.min_deadline_s)
  assert hand.of(events.GiveUp)  # One honest reply is no quorum of two.
  # What was claimed beyond the reports is in no book; what was reported, is.
  hand.tell(events.Left(**hand.where("L0")))
  totals = hand.totals("L0")
  assert totals.reported == (4, 400)
  assert sum(c.tokens for _, c in totals.discarded) == 400


@pytest.mark.parametrize(
  ("counts", "batch"), [(Counts(6, 700), 6), (Counts(4, 400), 4)]
)
def test_a_reply_ahead_of_its_report_is_taken(hand, counts, batch):
  effects = hand.reply("L0", counts=counts, positions=(Position(0, batch),))

  assert only(effects, events.Resolved).outcome is Outcome.ACCEPTED
  assert hand.state.accepted[0] == batch


def test_a_reply_ahead_of_the_adoption_it_counts_from_is_taken():
  hand = Hand(Rules(num_fragments=1, cycle_steps=4))
  for name in ("L0", "L1"):
    hand.join(name)
  hand.until_asked(("L0", "L1"))
  hand.reply("L1")
  hand.merged()
  hand.apply("L1")
  for _ in range(4):
    hand.now += 1.0
    for name in ("L0", "L1"):
      hand.report(name)

  effects = hand.reply(
    "L0",
    base=Version(1, 1),
    counts=Counts(7, 700),
    positions=(Position(0, 11),),
  )

  outcome = only(effects, events.Resolved).outcome
  assert outcome in (Outcome.ACCEPTED, Outcome.CARRIED)


def test_what_was_refused_at_the_edge_is_counted(hand):
  hand.tell(events.Misspoke(**hand.where("L0"), reason="5 steps after 9"))

  assert hand.state.counters["impossible"] == 1
