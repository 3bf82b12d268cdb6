"""What scripts/explore.py has found, each from its shortest schedule."""

import dataclasses

from ddiloco_jax.protocol import check, events, machine, status
from ddiloco_jax.protocol.events import Counts, Version
from ddiloco_jax.protocol.rules import Rules
from tests.protocol.by_hand import FOUR, ONE, Hand, only

TWO_SHARDS = Rules(
  num_fragments=1, cycle_steps=4, num_shards=2, max_learners=2, quorum=2
)


def fence_l0(hand: Hand) -> None:
  """L0 falls silent after a step; L2 takes its shard; L1 leaves."""
  hand.join("L0")
  hand.report("L0")
  hand.join("L1")
  hand.tick(20.0)
  hand.join("L2")
  hand.tell(events.Left(**hand.where("L1"), reason="done"))


def come_back(hand: Hand) -> list:
  """L0's process joins again, from the base that it had."""
  effects = hand.tell(
    events.Joined(learner="L0", nonce="L0-0", bases=tuple(hand.bases["L0"]))
  )
  welcome = only(effects, events.Welcome)
  hand.incarnations["L0"] = welcome.incarnation
  return effects


def test_a_process_that_lost_its_shard_starts_over_and_no_step_is_lost():
  hand = Hand(TWO_SHARDS)
  fence_l0(hand)

  come_back(hand)
  hand.counts["L0"] = [Counts(0, 0)]
  hand.report("L0", steps=2)

  totals = hand.totals("L0")
  assert totals.reported == Counts(3, 300)
  assert totals.pending == Counts(2, 200)
  assert totals.discarded == (("learner_lost", Counts(1, 100)),)


def test_what_a_process_had_that_never_came_back_is_lost():
  hand = Hand(TWO_SHARDS)
  fence_l0(hand)

  hand.join("L0", "another")

  totals = hand.totals("L0")
  assert totals.discarded == (("learner_lost", Counts(1, 100)),)


def test_a_process_that_was_admitted_again_may_reconnect():
  hand = Hand(TWO_SHARDS)
  fence_l0(hand)
  come_back(hand)
  hand.tell(events.Disconnected(**hand.where("L0")))

  effects = hand.tell(
    events.Joined(learner="L0", nonce="L0-0", bases=tuple(hand.bases["L0"]))
  )

  assert only(effects, events.Welcome).reconnect


def test_a_process_that_is_admitted_again_keeps_its_own_index():
  rules = Rules(num_fragments=1, cycle_steps=4, max_ahead=3, num_shards=2)
  hand = Hand(rules)
  fence_l0(hand)
  hand.report("L2", steps=9)
  assert hand.state.t > hand.steps["L0"] + 1

  come_back(hand)

  report = events.Reported(**hand.where("L0"), step=2, counts=(Counts(2, 200),))
  check.check(hand.state, report)  # It may say where it is.


def test_a_base_that_was_adopted_once_more_after_two_rollbacks_counts_anew():
  hand = Hand(FOUR)
  hand.join("L0")
  hand.report("L0", steps=3)
  saved = machine.save(hand.state)

  # Lost: an adoption of version 1, and after the rollback of version 0 again.
  restored = Hand(FOUR, machine.restore(FOUR, saved, epoch=3))
  effects = restored.tell(
    events.Joined(learner="L0", nonce="L0-0", bases=(Version(1, 0),))
  )
  assert only(effects, events.Welcome).reconnect
  report = events.Reported(
    learner="L0", incarnation=1, step=4, counts=(Counts(1, 100),)
  )
  check.check(restored.state, report)
  restored.tell(report)

  totals = status.account_totals(restored.state, "L0", 0)
  assert totals.reported == Counts(3, 300)


def test_a_gap_in_which_all_were_lost_is_no_step_time():
  hand = Hand(FOUR)
  hand.join("L0")
  for _ in range(4):
    hand.now += 1.0
    hand.report("L0")
  assert hand.state.step_s == 1.0

  hand.tick(700.0)
  hand.report("L0")

  assert hand.state.step_s == 1.0


def test_a_silence_that_a_heartbeat_ends_is_no_step_time():
  hand = Hand(ONE)
  hand.join("L0")
  for _ in range(4):
    hand.now += 1.0
    hand.report("L0")
  before = hand.state.step_s
  hand.tick(300.0)
  assert not hand.state.learners["L0"].live
  hand.tell(events.Heard(**hand.where("L0")))

  hand.now += 1.0
  hand.report("L0")

  assert hand.state.step_s == before


def test_steps_without_a_syncer_are_not_timed():
  hand = Hand(ONE)
  hand.join("L0")
  for _ in range(4):
    hand.now += 1.0
    hand.report("L0")
  restored = Hand(ONE, machine.restore(ONE, machine.save(hand.state)))
  restored.incarnations, restored.steps = hand.incarnations, hand.steps
  restored.counts, restored.bases = hand.counts, hand.bases
  restored.join("L0", bases=tuple(hand.bases["L0"]))

  restored.now += 0.1  # The run's clock stood still for 60 of its steps.
  restored.report("L0", steps=60)
  assert restored.state.step_s == 1.0
  restored.now += 1.0
  restored.report("L0")

  assert restored.state.step_s == 1.0


def test_who_missed_the_end_of_an_extended_run_loses_no_step():
  hand = Hand(FOUR)
  hand.join("L0")
  hand.report("L0", steps=3)
  hand.tell(events.Disconnected(**hand.where("L0")))
  hand.tell(events.StopRequested(reason="test"))
  hand.tick(100.0)
  assert only(hand.effects, events.Finished)
  assert hand.totals("L0").pending == Counts()

  again = Hand(FOUR, machine.restore(FOUR, machine.save(hand.state)))
  again.tell(events.Joined(learner="L0", nonce="L0-0", bases=(Version(1, 0),)))
  again.tell(
    events.Reported(
      learner="L0", incarnation=1, step=4, counts=(Counts(4, 400),)
    )
  )

  totals = status.account_totals(again.state, "L0", 0)
  assert totals.reported == totals.pending == Counts(4, 400)
  assert not totals.discarded


def test_who_was_silent_is_told_of_what_was_merged_meanwhile():
  # Of both contributors nothing was heard over a merge; their streams stayed
  # open. They can be asked again only from the version that they are told of.
  hand = Hand(dataclasses.replace(ONE, quorum=2))
  for name in ("L0", "L1"):
    hand.join(name)
  for name in ("L0", "L1"):
    hand.report(name)
  for name in ("L0", "L1"):
    hand.reply(name)
  hand.tick(ONE.lease_s + 1.0)

  publish = only(hand.merged(), events.Publish)

  assert not any(m.live for m in hand.state.learners.values())
  assert {r.learner for r in publish.receivers} == {"L0", "L1"}


def test_a_late_reply_from_before_the_last_adoption_is_not_booked_again():
  # It ends with the version that L0 trained from, which L0 adopts once more.
  hand = Hand(dataclasses.replace(ONE, quorum=2))
  hand.join("L0")
  hand.join("L1")
  hand.until_asked(["L0", "L1"])
  pull, counts = hand.pull("L0"), hand.counts["L0"][0]
  hand.tick(hand.rules.min_deadline_s + 100.0)
  assert hand.of(events.GiveUp)
  hand.apply("L0", exact=True)

  effects = hand.reply("L0", pull, counts=counts)

  assert only(effects, events.Resolved).outcome is events.Outcome.LATE
  assert hand.totals("L0").reported == counts
  hand.report("L0", steps=2)
  assert hand.totals("L0").reported.steps == counts.steps + 2


def test_a_reply_that_moved_before_the_last_adoption_covers_what_was_before():
  hand = Hand(dataclasses.replace(ONE, quorum=2))
  hand.join("L0")
  hand.join("L1")
  hand.until_asked(["L0", "L1"])
  counts = hand.counts["L0"][0]
  hand.push("L0", 1)
  hand.apply("L0")

  effects = hand.reply("L0", counts=counts)

  assert only(effects, events.Resolved).outcome is events.Outcome.ACCEPTED
  assert hand.totals("L0").reported == counts
  hand.reply("L1")
  hand.tick(1.0)
  hand.merged()
  assert hand.totals("L0").merged == counts


def test_one_base_adopted_again_and_again_takes_no_room():
  hand = Hand(dataclasses.replace(ONE, quorum=2))
  hand.join("L0")
  hand.join("L1")
  hand.until_asked(["L0", "L1"])
  for _ in range(100):
    hand.apply("L0")
    hand.report("L0", steps=1)

  (account,) = hand.state.accounts["L0"]
  assert len(account.spans) <= 2
  totals = hand.totals("L0")
  assert totals.reported.steps == hand.steps["L0"]
