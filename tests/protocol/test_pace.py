"""The pace of t, the slots, and what learners of unequal speed come to."""

import collections
import dataclasses
import statistics

import pytest

from ddiloco_jax.protocol import events, ledger, machine, schedule, status
from ddiloco_jax.protocol.rules import Rules
from tests.protocol.by_hand import Hand
from tests.protocol.driver import Learner, Run

PAPER = Rules(num_fragments=24, cycle_steps=24, num_syncer_steps=150)
SMALL = Rules(num_fragments=6, cycle_steps=12, num_syncer_steps=180)


def fleet(num: int, **more) -> list[Learner]:
  return [Learner(f"L{i}", start_at=0.13 * i, **more) for i in range(num)]


def realised(run: Run) -> list[float]:
  num = run.rules.num_fragments
  return [status.realised_h(run.state, p) for p in range(num)]


def contributors(run: Run, warm: int = 10) -> list[int]:
  """Contributors per merge, the first merges and the flush left out."""
  end = next(
    i for i, e in enumerate(run.effects) if isinstance(e, events.Ending)
  )
  merges = [e for e in run.effects[:end] if isinstance(e, events.Merge)]
  return [len(merge.inputs) for merge in merges[warm:]]


@pytest.mark.parametrize(("num", "cycle"), [(24, 24), (4, 24), (5, 24), (1, 7)])
def test_every_fragment_has_a_slot_of_its_own(num, cycle):
  found = schedule.slots(num, cycle)

  assert sorted(found.values()) == list(range(num))
  assert all(slot == p * cycle // num for slot, p in found.items())


@pytest.mark.parametrize("num_learners", [1, 4])
@pytest.mark.parametrize("step_s", [0.05, 1.0])
def test_realised_h_is_the_configured_one_on_a_fast_link(num_learners, step_s):
  learners = fleet(num_learners, step_s=step_s, up_s=0.001, down_s=0.001)

  run = Run(PAPER, learners, merge_s=0.002).run(10**4)

  assert run.finished is not None
  for h in realised(run):
    assert abs(h - 24) <= 0.2 * 24


def test_realised_h_holds_at_small_h_and_jittered_speeds():
  learners = [
    Learner(f"L{i}", step_s=1.0 + 0.05 * i, start_at=0.3 * i) for i in range(4)
  ]

  run = Run(SMALL, learners).run(10**4)

  for h in realised(run):
    assert abs(h - 12) <= 3


def test_t_is_paced_by_step_time_and_not_by_the_link():
  run = Run(PAPER, fleet(4, up_s=0.0, down_s=0.0), merge_s=0.0).run(100)

  assert 95 <= run.state.t <= 102


def test_t_has_at_most_one_step_of_credit_after_a_gap():
  hand = Hand(Rules(num_fragments=1, cycle_steps=4))
  hand.join("L0")
  for _ in range(20):
    hand.cycle(["L0"])
  before = hand.state.t
  hand.now += 12.0

  for _ in range(50):
    hand.report("L0")

  assert hand.state.t - before <= 3


def test_t_does_not_advance_before_k_learners_reported():
  hand = Hand(Rules(num_fragments=1, cycle_steps=4, quorum=2))
  hand.join("L0")
  hand.join("L1")
  hand.report("L0")
  for _ in range(5):
    hand.now += 1
    hand.report("L0")
  assert hand.state.t == 0

  hand.report("L1")

  assert hand.state.t == 1


def test_the_first_two_steps_of_a_process_are_not_timed():
  hand = Hand(Rules(num_fragments=1, cycle_steps=4))
  hand.join("L0")
  for dt in (40.0, 30.0):
    hand.now += dt
    hand.report("L0")
  assert hand.state.step_s is None

  hand.now += 1.0
  hand.report("L0")

  assert hand.state.step_s == pytest.approx(1.0)


def test_the_median_of_an_even_number_is_the_faster_middle_one():
  run = Run(
    PAPER, [Learner(f"L{i}", step_s=float(i + 1)) for i in range(4)]
  ).run(60)
  fast = Run(
    dataclasses.replace(PAPER, pace="fastest"),
    [Learner(f"L{i}", step_s=float(i + 1)) for i in range(4)],
  ).run(60)

  assert run.state.step_s == pytest.approx(2.0)
  assert fast.state.step_s == pytest.approx(1.0)


def test_a_learner_four_times_slower_takes_part_in_nearly_every_merge():
  """Field report M6: K = 1 with grace, members = live."""
  learners = [Learner("L0"), Learner("L1", step_s=4.0)]

  run = Run(dataclasses.replace(PAPER, num_syncer_steps=300), learners).run(
    10**4
  )

  assert statistics.mean(contributors(run, 24)) > 1.8
  weights = collections.defaultdict(list)
  for merge in run.of(events.Merge)[24:-24]:
    for key, weight in merge.inputs:
      weights[key.learner].append(weight)
  ratio = statistics.mean(weights["L1"]) / statistics.mean(weights["L0"])
  assert 0.2 < ratio < 0.3
  assert run.learners["L0"].bases == run.learners["L1"].bases


def test_a_boundary_answer_is_late_where_a_prefetched_copy_is_not():
  prefetched = Run(SMALL, fleet(4)).run(10**4)
  at_boundary = Run(SMALL, fleet(4, at_boundary=True)).run(10**4)

  assert statistics.mean(contributors(prefetched)) > 3.8
  assert statistics.mean(contributors(at_boundary)) <= statistics.mean(
    contributors(prefetched)
  )


def test_a_slow_link_is_carried_and_never_given_up():
  """Field report T11: uploads of many steps, K = 1 and faster peers."""
  learners = [*fleet(2), Learner("L2", push_s=30.0)]
  rules = dataclasses.replace(SMALL, lease_s=5.0, num_syncer_steps=400)

  run = Run(rules, learners).run(10**4)

  assert "lease_expired" not in run.state.counters
  carried = [
    e for e in run.of(events.Resolved) if e.outcome is events.Outcome.CARRIED
  ]
  merged = {i.key for merge in run.of(events.Merge) for i in merge.inputs}
  assert len(carried) >= 10
  assert len([e for e in carried if e.key in merged]) >= len(carried) - 1


def test_overwritten_in_flight_is_a_small_part_at_equal_speed():
  run = Run(PAPER, fleet(4)).run(10**4)

  totals = [a for row in run.state.accounts.values() for a in row]
  reported = sum(a.reported.steps for a in totals)
  lost = sum(
    dict(a.discarded).get(ledger.OVERWRITTEN, (0, 0))[0] for a in totals
  )
  assert 0.01 < lost / reported < 0.10


def test_learners_in_lockstep_merge_every_boundary_with_everybody():
  rules = Rules(
    num_fragments=2,
    cycle_steps=6,
    quorum=3,
    max_open_rounds=2,
    wait_for_publication=True,
    num_syncer_steps=60,
  )
  learners = [
    Learner("L0"),
    Learner("L1", step_s=1.3),
    Learner("L2", step_s=0.7),
  ]

  run = Run(rules, learners).run(10**4)

  assert run.finished is not None
  assert run.finished.exit_code == 0
  end = next(
    i for i, e in enumerate(run.effects) if isinstance(e, events.Ending)
  )
  merges = [e for e in run.effects[:end] if isinstance(e, events.Merge)]
  assert len(merges) >= 18
  for merge in merges:
    assert len(merge.inputs) == 3
  steps = {
    e.counts.steps
    for e in run.events
    if isinstance(e, events.Replied) and e.round > 2 and e.time < run.now - 5
  }
  assert steps == {6}
  assert not run.of(events.GiveUp)


def test_lockstep_with_a_delay_adopts_tau_steps_later():
  rules = Rules(
    num_fragments=2,
    cycle_steps=6,
    quorum=2,
    wait_for_publication=True,
    adoption_delay_steps=2,
    num_syncer_steps=60,
  )

  run = Run(rules, [Learner("L0"), Learner("L1", step_s=1.5)]).run(10**4)

  assert run.finished is not None
  counts = collections.Counter(len(m.inputs) for m in run.of(events.Merge))
  assert counts[2] >= 18
  assert not run.of(events.GiveUp)


def test_a_learner_that_restarts_in_lockstep_does_not_stop_the_others():
  rules = Rules(
    num_fragments=2,
    cycle_steps=6,
    quorum=2,
    wait_for_publication=True,
    num_syncer_steps=60,
  )
  run = Run(rules, [Learner("L0"), Learner("L1")]).run(20.5)
  run.kill("L1")
  run.run(26.0)

  run.restart("L1")
  run.run(10**4)

  assert run.finished is not None
  assert run.finished.exit_code == 0
  assert run.now < 120


def test_max_ahead_follows_the_kth_largest_index():
  rules = Rules(num_fragments=1, cycle_steps=4, quorum=2, max_ahead=3)
  hand = Hand(rules)
  hand.join("L0")
  hand.join("L1")
  hand.report("L0", 3)
  assert hand.state.t == 0

  hand.report("L1", 2)
  assert hand.state.t == 2
  hand.join("L2")

  assert hand.steps["L2"] == 2


def test_t_follows_a_jump_of_any_size_at_once():
  # As after a rollback, or by a learner that is wrong about its step.
  rules = Rules(num_fragments=2, cycle_steps=4, max_ahead=3)
  hand = Hand(rules)
  hand.join("L0")

  hand.report("L0", 2**50)

  assert hand.state.t == 2**50
  due = {pull.fragment for pull in hand.of(events.Pull)}
  assert due | {due.fragment for due in hand.state.queue} == {0, 1}


def test_a_late_joiner_changes_nothing_for_the_others():
  """Field report M8: the second learner starts 90 s after the first."""
  learners = [Learner("L0"), Learner("L1", start_at=90.0)]

  run = Run(dataclasses.replace(SMALL, num_syncer_steps=150), learners).run(
    10**4
  )

  assert run.finished is not None
  assert run.finished.exit_code == 0
  assert contributors(run)[-1] == 2


def test_a_killed_learner_returns_into_the_merges():
  run = Run(SMALL, fleet(4)).run(40)
  run.kill("L1")
  run.run(80)

  run.restart("L1")
  run.run(10**4)

  assert run.finished is not None
  mine = [
    merge
    for merge in run.of(events.Merge)
    if any(
      i.key.learner == "L1" and i.key.incarnation > 4 for i in merge.inputs
    )
  ]
  assert len(mine) >= 2
  assert machine.digest(run.state)
