"""Streaming DiLoCo: a fragment after the other, adopted some steps later.

(arXiv 2501.18512)
"""

import dataclasses

from ddiloco_jax.chaos.scenario import Scenario
from ddiloco_jax.chaos.systems import decoupled
from ddiloco_jax.chaos.tally import Tally


def simulate(scenario: Scenario) -> Tally:
  """Runs the scenario with a quorum of all; tau is the delay of adoption."""
  sync = scenario.sync
  sync = dataclasses.replace(
    sync,
    quorum=scenario.learners.num,
    wait_for_publication=True,
    adoption_delay_steps=sync.max_open_rounds,
    alpha=0.5,
    grace_fraction=0.0,
    max_learners=max(scenario.learners.num, sync.max_learners),
  )
  return decoupled.simulate(dataclasses.replace(scenario, sync=sync))
