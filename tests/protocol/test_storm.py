"""The plan of a storm of kills, done to the machine in virtual time."""

import statistics

import pytest

from ddiloco_jax.chaos.plan import KILLS_ONLY, ChaosConfig, plan_faults
from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.report.ordeal import is_balanced
from tests.protocol.driver import Learner, Run

NUM = 32


def storm(duration_s, num_fragments, cycle_steps):
  rules = Rules(
    num_fragments=num_fragments, cycle_steps=cycle_steps, lease_s=5.0
  )
  run = Run(rules, [Learner(f"l{n}", step_s=1.0) for n in range(NUM)])
  faults = plan_faults(
    ChaosConfig(
      num_learners=NUM,
      duration_s=duration_s,
      faults_per_hour=125.0,
      mix=KILLS_ONLY,
      down_s=5.0,
    )
  )
  for fault in faults:
    run.at(fault.at_s, run.kill, f"l{fault.target}")
    run.at(fault.end_s, run.restart, f"l{fault.target}")
  return run.run(until=duration_s), faults


@pytest.mark.parametrize(
  "duration_s",
  [
    300.0,
    pytest.param(86_400.0, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
  ],
)
def test_most_of_32_learners_contribute_in_a_storm_of_kills(duration_s):
  # [M7] 125 kills an hour; a minute is left out in which all begin.
  run, faults = storm(duration_s, num_fragments=6, cycle_steps=24)

  merges = [
    len(e.inputs)
    for e, at_s in zip(run.effects, run.times, strict=True)
    if isinstance(e, events.Merge) and at_s > 60.0
  ]
  assert len(faults) == round(125.0 * duration_s / 3600)
  assert statistics.median(merges) >= 28
  assert is_balanced(run.state)
