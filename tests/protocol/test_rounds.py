"""Rounds: members, quorum, grace, late and carried replies, deadlines."""

import dataclasses

import pytest

from ddiloco_jax.protocol import events, ledger, machine, quorum
from ddiloco_jax.protocol.events import ZERO, Counts, Outcome, Version
from ddiloco_jax.protocol.rules import Rules
from tests.protocol.by_hand import FOUR, ONE, Hand, all_of, only

TWO = dataclasses.replace(ONE, quorum=2)


def pair(rules: Rules = TWO) -> Hand:
  """Two learners that took one step, and the round that this opened."""
  hand = Hand(rules)
  hand.join("L0")
  hand.join("L1")
  hand.report("L0")
  hand.report("L1")
  return hand


def with_estimates(
  names=("L0", "L1"), rules: Rules = FOUR, num_cycles: int = 24
) -> Hand:
  """Learners of 1 s a step, with every moving average known."""
  hand = Hand(rules)
  for name in names:
    hand.join(name)
  for _ in range(num_cycles):
    hand.cycle(names)
  assert hand.state.step_s == pytest.approx(1.0)
  assert hand.state.sync_s is not None
  return hand


def asked(names=("L0", "L1"), rules: Rules = FOUR) -> Hand:
  """As before, with a round just opened that asks all; K is 1."""
  hand = with_estimates(names, rules)
  hand.until_asked(names)
  return hand


def test_weight_is_tokens_times_tokens_per_step():
  assert quorum.weight(Counts(10, 100)) == 1000.0
  assert quorum.weight(Counts(0, 100)) == 0.0
  assert quorum.weight(Counts(10, 0)) == 0.0


def test_one_to_three_tokens_at_equal_steps_weigh_one_to_nine():
  hand = Hand(TWO)
  hand.join("L0")
  hand.join("L1")
  hand.report("L0", tokens=100)
  hand.report("L1", tokens=300)
  hand.reply("L0")

  merge = only(hand.reply("L1"), events.Merge)

  light, heavy = (i.weight for i in merge.inputs)
  assert heavy == 9 * light


@pytest.mark.parametrize(
  ("tau", "quorum_s", "sync_s", "expected"),
  [
    (2, 0.25, 0.25, 1.0),  # 0.8 * 1.5 is more than a step
    (2, 0.9, 0.9, 0.16),
    (2, 1.5, 0.6, 0.0),
    (1, 0.25, 0.25, 0.4),
  ],
)
def test_grace_is_the_slack_times_gamma(tau, quorum_s, sync_s, expected):
  rules = Rules(max_open_rounds=tau)

  assert quorum.grace_s(rules, 1.0, quorum_s, sync_s) == pytest.approx(expected)


def test_without_an_estimate_there_is_no_grace():
  assert quorum.grace_s(Rules(), None, 0.1, 0.1) == 0.0
  assert quorum.grace_s(Rules(), 1.0, None, 0.1) == 0.0
  assert quorum.grace_s(Rules(), 1.0, 0.1, None) == 0.0


def test_a_round_pulls_frozen_members_and_merges_k_replies_in_their_order():
  hand = pair()
  assert {p.learner for p in hand.of(events.Pull)} == {"L0", "L1"}

  assert only(hand.reply("L1"), events.Resolved).outcome is Outcome.ACCEPTED
  merge = only(hand.reply("L0"), events.Merge)

  assert [i.key.learner for i in merge.inputs] == ["L1", "L0"]
  assert merge.version == Version(1, 1)
  publish = only(hand.merged(), events.Publish)
  assert {r.outcome for r in publish.receivers} == {Outcome.INCLUDED}


def test_below_k_members_no_round_opens():
  hand = Hand(TWO)
  hand.join("L0")

  for _ in range(20):
    hand.now += 1
    hand.report("L0")

  assert not hand.of(events.Pull)
  assert "1 more learner: quorum 2, 1 live (L0)" in hand.waiting_for()


def test_grace_ends_early_when_every_member_has_replied():
  hand = asked()
  assert not all_of(hand.reply("L0"), events.Merge)

  merge = only(hand.reply("L1"), events.Merge)

  assert len(merge.inputs) == 2


def test_grace_ends_at_its_window_and_the_straggler_is_late():
  # It adopts what was merged without it before it has begun to answer.
  hand = asked()
  hand.reply("L0")
  end = hand.state.rounds[0].grace_end
  assert 0 < end - hand.now <= 1.0

  merge = only(hand.tick(end - hand.now), events.Merge)
  receivers = only(hand.merged(), events.Publish).receivers
  counts = hand.counts["L1"][0]
  before = dict(hand.totals("L1").discarded).get(ledger.OVERWRITTEN, ZERO)
  hand.apply("L1")
  hand.report("L1")
  late = only(hand.reply("L1"), events.Resolved)

  assert [i.key.learner for i in merge.inputs] == ["L0"]
  outcomes = {r.learner: r.outcome for r in receivers}
  assert outcomes == {"L0": Outcome.INCLUDED, "L1": Outcome.CARRIED}
  assert late.outcome is Outcome.LATE
  lost = dict(hand.totals("L1").discarded)[ledger.OVERWRITTEN]
  assert ledger.minus(lost, before) == counts
  hand.apply("L0")
  hand.until_asked(["L0", "L1"])  # It is not waited for any longer.


def closed_without_l1() -> tuple[Hand, events.Pull, Version, Counts]:
  """L0's reply has closed the round before L1 could begin to answer."""
  hand = asked()
  slow, base = hand.pull("L1"), hand.bases["L1"][0]
  counts = hand.counts["L1"][0]
  hand.reply("L0")
  hand.tick(hand.state.rounds[0].grace_end - hand.now)
  hand.merged()
  hand.apply("L0")
  return hand, slow, base, counts


def test_a_reply_that_begins_after_its_round_is_carried_and_merged_once():
  # A link may take longer than the grace window to bring the first byte.
  hand, slow, base, counts = closed_without_l1()
  before = hand.totals("L1")
  hand.tick(2.0)
  hand.push("L1", 0, slow)
  hand.apply("L1")
  hand.push("L1", 1, slow)

  told = only(hand.reply("L1", slow, base=base, counts=counts), events.Resolved)
  hand.until_asked(["L0"])
  merge = only(hand.reply("L0"), events.Merge)
  hand.merged()

  assert told.outcome is Outcome.CARRIED
  assert slow.round in {i.key.round for i in merge.inputs}
  merged = hand.totals("L1").merged
  assert merged == ledger.plus(before.merged, counts)
  again = hand.reply("L1", slow, base=base, counts=counts)
  assert only(again, events.Resolved).outcome is Outcome.DUPLICATE


def test_a_reply_that_does_not_begin_is_not_waited_for():
  hand, slow, base, counts = closed_without_l1()
  wait_s = 10 * hand.state.step_s
  hand.tick(wait_s / 2)
  assert hand.state.learners["L1"].asked

  hand.tick(wait_s / 2 + 0.1)

  assert not hand.state.learners["L1"].asked
  assert hand.state.counters["carry_expired"] == 1
  late = hand.reply("L1", slow, base=base, counts=counts)
  assert only(late, events.Resolved).outcome is Outcome.LATE


def test_a_learner_that_falls_silent_or_is_replaced_is_not_carried():
  for end in (
    lambda hand: hand.tick(hand.state.rules.lease_s + 0.1),
    lambda hand: hand.join("L1", "L1-new", takeover=True),
  ):
    hand, slow, base, counts = closed_without_l1()

    end(hand)

    assert not hand.state.learners["L1"].asked
    late = hand.reply("L1", slow, base=base, counts=counts)
    assert only(late, events.Resolved).outcome is not Outcome.CARRIED


def test_a_round_that_is_given_up_takes_its_pulls_back():
  hand = pair()
  hand.reply("L0")

  hand.tick(TWO.min_deadline_s)

  assert hand.of(events.GiveUp)
  assert not hand.state.learners["L1"].asked
  late = only(hand.reply("L1", hand.pull("L1")), events.Resolved)
  assert late.outcome is Outcome.LATE


def test_who_reconnects_is_asked_again_for_what_it_has_not_begun():
  hand, slow, *_ = closed_without_l1()
  hand.tell(events.Disconnected(**hand.where("L1")))

  pull = only(hand.join("L1", bases=tuple(hand.bases["L1"])), events.Pull)

  assert (pull.round, pull.attempt) == (slow.round, slow.attempt)


def test_the_same_push_twice_counts_once_and_is_told_the_same():
  hand = pair(dataclasses.replace(TWO, quorum=1))
  hand.reply("L0")
  hand.merged()
  before = hand.totals("L0")

  again = only(hand.reply("L0"), events.Resolved)

  assert again.outcome is Outcome.DUPLICATE
  assert again.first is Outcome.ACCEPTED
  assert hand.totals("L0") == before


def test_a_push_that_nobody_asked_for_is_refused_and_counted():
  hand = pair()
  pull = hand.pull("L0")
  foreign = dataclasses.replace(pull, round=pull.round + 7)
  before = hand.state.rounds

  resolved = only(hand.reply("L0", foreign), events.Resolved)

  assert resolved.outcome is Outcome.REFUSED
  assert "not asked" in resolved.reason
  assert hand.state.counters["not_asked"] == 1
  assert hand.state.rounds == before


def test_a_forged_id_is_refused():
  hand = pair()
  forged = dataclasses.replace(hand.pull("L0"), learner="L7")
  hand.bases["L7"], hand.counts["L7"] = hand.bases["L0"], hand.counts["L0"]

  resolved = only(hand.reply("L7", forged), events.Resolved)

  assert resolved.outcome is Outcome.REFUSED


def test_the_deadline_gives_up_and_a_new_attempt_waits_for_a_step():
  hand = pair()
  first = hand.pull("L0")
  hand.reply("L0")
  hand.tick(ONE.min_deadline_s - 0.01)
  assert not hand.of(events.GiveUp)

  effects = hand.tick(0.02)

  give_up = only(effects, events.GiveUp)
  assert "1 of 2 members replied" in give_up.reason
  assert only(effects, events.Free).key.learner == "L0"
  assert not all_of(effects, events.Pull)
  hand.tick(ONE.min_deadline_s)
  second = hand.pull("L0")
  assert (second.round, second.attempt) == (first.round, first.attempt + 1)
  assert hand.totals("L0").pending == (1, 100)


def test_moving_bytes_extend_the_deadline():
  hand = pair()
  hand.reply("L0")

  for num_bytes in range(30):
    hand.tick(1.0)
    hand.push("L1", num_bytes)
    hand.tell(events.Heard(**hand.where("L0")))
  merge = only(hand.reply("L1"), events.Merge)

  assert not hand.of(events.GiveUp)
  assert len(merge.inputs) == 2


def test_bytes_that_stand_still_do_not_extend_it():
  hand = pair()
  hand.reply("L0")
  hand.push("L1", 5)

  for _ in range(5):
    hand.tick(1.0)
    hand.push("L1", 5)
  hand.tick(0.1)

  assert hand.of(events.GiveUp)


def carrying() -> tuple[Hand, events.Pull, Version, Counts]:
  """L1's upload still moves when L0's reply has closed the round."""
  hand = asked()
  hand.push("L1", 1)
  slow, base, counts = (
    hand.pull("L1"),
    hand.bases["L1"][0],
    hand.counts["L1"][0],
  )
  hand.reply("L0")
  hand.tick(hand.state.rounds[0].grace_end - hand.now)
  return hand, slow, base, counts


def test_a_slow_upload_is_carried_into_the_next_round_and_merged_once():
  hand, slow, base, counts = carrying()
  receivers = only(hand.merged(), events.Publish).receivers
  assert {r.learner: r.outcome for r in receivers}["L1"] is Outcome.CARRIED
  before = hand.totals("L1")
  hand.apply("L0")
  hand.report("L1")
  hand.apply("L1")
  assert hand.totals("L1").pending == (counts.steps + 1, counts.tokens + 100)

  told = only(hand.reply("L1", slow, base=base, counts=counts), events.Resolved)
  hand.until_asked(["L0"])
  merge = only(hand.reply("L0"), events.Merge)
  hand.merged()

  assert told.outcome is Outcome.CARRIED
  assert {i.key.learner for i in merge.inputs} == {"L0", "L1"}
  assert slow.round in {i.key.round for i in merge.inputs}
  after = hand.totals("L1")
  assert after.merged == ledger.plus(before.merged, counts)
  lost = ledger.minus(
    dict(after.discarded)[ledger.OVERWRITTEN],
    dict(before.discarded)[ledger.OVERWRITTEN],
  )
  assert lost == (1, 100)
  again = only(
    hand.reply("L1", slow, base=base, counts=counts), events.Resolved
  )
  assert again.outcome is Outcome.DUPLICATE
  assert again.first is Outcome.CARRIED


def test_a_carried_reply_enters_the_round_that_is_open():
  hand, slow, base, counts = carrying()
  hand.merged()
  hand.apply("L0")
  hand.until_asked(["L0"])

  told = only(hand.reply("L1", slow, base=base, counts=counts), events.Resolved)
  effects = hand.reply("L0")

  assert told.outcome is Outcome.CARRIED
  merge = only(effects, events.Merge)
  assert [i.key.learner for i in merge.inputs] == ["L1", "L0"]
  assert merge.inputs[0].key.round == slow.round


def test_a_carried_upload_that_stalls_is_not_waited_for():
  hand = asked()
  hand.push("L1", 1)
  slow = hand.pull("L1")
  hand.reply("L0")
  hand.tick(hand.state.rounds[0].grace_end - hand.now)
  hand.merged()
  assert hand.state.learners["L1"].asked

  hand.tick(10 * hand.state.step_s + 0.1)

  assert not hand.state.learners["L1"].asked
  assert only(hand.reply("L1", slow), events.Resolved).outcome is Outcome.LATE


def test_a_learner_is_not_merged_twice_from_one_base():
  hand = with_estimates(("L0",), ONE)
  hand.now += 1
  hand.report("L0")
  hand.reply("L0")
  hand.merged()

  hand.now += 1
  assert not all_of(hand.report("L0"), events.Pull)
  assert "1 more eligible learner" in hand.waiting_for()
  hand.apply("L0")
  hand.now += 1
  assert all_of(hand.report("L0"), events.Pull)


def test_a_base_that_was_merged_already_is_refused():
  hand = asked(("L0",))
  old = hand.bases["L0"][0]._replace(n=0)

  effects = hand.reply("L0", base=old)

  assert only(effects, events.Resolved).outcome is Outcome.REFUSED
  assert "base_merged" in only(effects, events.Resolved).reason
  assert only(effects, events.Publish).receivers[0].learner == "L0"


def far_behind(num_merges: int, rules: Rules = ONE) -> Hand:
  """L1 trains on version 0 while L0 alone takes the fragment on."""
  hand = Hand(rules)
  hand.join("L0")
  hand.join("L1")
  for _ in range(num_merges):
    hand.cycle(["L0"])
  hand.report("L1")
  hand.now += 1
  hand.report("L0")
  if not all_of([hand.pull("L1")], events.Pull):
    raise AssertionError
  return hand


def test_a_stale_reply_is_merged_from_its_own_base_up_to_the_cap():
  hand = far_behind(4)

  effects = hand.reply("L1")

  resolved = only(effects, events.Resolved)
  assert resolved.outcome is Outcome.ACCEPTED
  assert "staleness 4" in resolved.reason


def test_beyond_the_cap_it_is_refused_and_told_to_take_the_global_one():
  hand = far_behind(9)

  effects = hand.reply("L1")

  resolved = only(effects, events.Resolved)
  assert resolved.outcome is Outcome.REFUSED
  assert "9 versions behind" in resolved.reason
  publish = only(effects, events.Publish)
  assert publish.version.n == 9
  assert [r.learner for r in publish.receivers] == ["L1"]
  hand.apply("L1")
  assert dict(hand.totals("L1").discarded)["refused(stale)"] == (1, 100)


def test_stale_reject_refuses_any_older_base():
  hand = far_behind(1, dataclasses.replace(ONE, stale="reject"))

  resolved = only(hand.reply("L1"), events.Resolved)

  assert resolved.outcome is Outcome.REFUSED
  assert "stale='reject'" in resolved.reason


def test_a_given_up_round_does_not_stop_the_next_from_merging():
  """Everybody's base is then two versions old, and that is fine (N17)."""
  hand = with_estimates(("L0", "L1"), TWO)
  hand.now += 1
  hand.report("L0")
  hand.report("L1")
  for _ in range(12):
    hand.now += 1
    hand.report("L0")
    hand.report("L1")
  assert only(hand.of(events.GiveUp), events.GiveUp)
  n = hand.state.fragments[0].version.n
  assert hand.state.counters["slot_missed"] > 0

  hand.reply("L0")
  hand.reply("L1")
  hand.merged()

  assert hand.state.fragments[0].version.n == n + 1


def test_zero_tokens_weigh_nothing_and_never_loop():
  hand = Hand(ONE)
  hand.join("L0")
  num_events = 0
  for _ in range(60):
    hand.now += 0.5
    for pull in all_of(hand.report("L0", tokens=0), events.Pull):
      hand.reply("L0", pull)
    at = machine.next_timer(hand.state)
    while at is not None and at <= hand.now + 0.5 and num_events < 1000:
      hand.tick(at - hand.now)
      num_events += 1
      at = machine.next_timer(hand.state)

  assert not hand.of(events.Merge)
  give_ups = hand.of(events.GiveUp)
  assert 1 <= len(give_ups) <= 6
  assert num_events < 200


def test_a_weightless_reply_does_not_make_the_quorum_of_one():
  hand = asked()
  zero = Counts(0, 100)

  assert not all_of(hand.reply("L0", counts=zero), events.Merge)
  merge = only(hand.reply("L1"), events.Merge)

  steps = hand.counts["L1"][0].steps
  assert [i.weight for i in merge.inputs] == [0.0, 100.0 * 100.0 * steps]


def test_members_reported_pulls_only_from_those_that_stepped():
  rules = dataclasses.replace(FOUR, members="reported")
  names = ("L0", "L1", "L2")
  for found, hand in (
    (2, with_estimates(names, rules)),
    (3, with_estimates(names, FOUR)),
  ):
    hand.cycle(names)

    hand.until_asked(["L0", "L1"])

    assert len(hand.state.rounds[0].members) == found


def test_at_most_tau_rounds_are_open():
  rules = Rules(num_fragments=8, cycle_steps=8, max_open_rounds=2)
  hand = Hand(rules)
  hand.join("L0")
  hand.join("L1", max_replies=9)
  for _ in range(30):
    hand.now += 1
    hand.report("L0")
    hand.report("L1")
    assert len(hand.state.rounds) <= 2
    fragments = [r.fragment for r in hand.state.rounds]
    assert len(set(fragments)) == len(fragments)


def test_a_broken_push_leaves_no_trace_and_may_be_tried_again():
  hand = pair()
  hand.push("L0", 3)
  pull = hand.pull("L0")
  before = hand.totals("L0")

  hand.tell(
    events.PushBroken(
      **hand.where("L0"),
      fragment=0,
      round=pull.round,
      attempt=pull.attempt,
      reason="reset",
    )
  )

  assert hand.totals("L0") == before
  assert only(hand.reply("L0"), events.Resolved).outcome is Outcome.ACCEPTED


def test_a_learner_killed_in_its_push_does_not_stop_the_others():
  hand = asked()
  n = hand.state.fragments[0].version.n
  hand.push("L1", 3)
  hand.tell(events.Disconnected(**hand.where("L1")))

  for _ in range(12):
    hand.serve(["L0"])
    hand.cycle(["L0"])

  assert hand.state.fragments[0].version.n >= n + 3
  assert not hand.of(events.GiveUp)


def test_a_reply_that_overtakes_the_adoption_of_its_base_is_booked_right():
  hand = asked()
  hand.reply("L1")
  hand.tick(hand.state.rounds[0].grace_end - hand.now)
  hand.merged()
  hand.apply("L1")
  hand.until_asked(["L0", "L1"])
  before, reset = hand.totals("L0"), hand.counts["L0"][0]
  newest = hand.state.fragments[0].version

  hand.reply("L0", base=newest, counts=Counts(1, 100))
  hand.apply("L0", 0, newest)
  hand.counts["L0"][0] = Counts(1, 100)
  hand.reply("L1")
  hand.merged()

  after = hand.totals("L0")
  assert after.merged == ledger.plus(before.merged, Counts(1, 100))
  lost = dict(after.discarded)[ledger.OVERWRITTEN]
  assert lost.steps == reset.steps
  assert after.reported.steps == before.reported.steps + 1
