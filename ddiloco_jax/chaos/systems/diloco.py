"""DiLoCo: all learners exchange the whole model every H steps, and wait for it.

(arXiv 2311.08105)
"""

import dataclasses

from ddiloco_jax.chaos.scenario import Scenario
from ddiloco_jax.chaos.systems import decoupled
from ddiloco_jax.chaos.tally import Tally


def simulate(scenario: Scenario) -> Tally:
  """Runs the scenario with a quorum of all and one fragment."""
  sync = dataclasses.replace(
    scenario.sync,
    num_fragments=1,
    max_open_rounds=1,
    quorum=scenario.learners.num,
    wait_for_publication=True,
    adoption_delay_steps=0,
    grace_fraction=0.0,
    max_learners=max(scenario.learners.num, scenario.sync.max_learners),
  )
  return decoupled.simulate(dataclasses.replace(scenario, sync=sync))
