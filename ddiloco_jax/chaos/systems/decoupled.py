"""Learners that wait for nobody, and a syncer: the system of this project."""

import dataclasses

from ddiloco_jax.chaos.scenario import Scenario
from ddiloco_jax.chaos.simulate import Simulation
from ddiloco_jax.chaos.tally import Tally


def simulate(scenario: Scenario) -> Tally:
  """Runs the learners and the syncer's state machine to the end of the run."""
  simulation = Simulation(admitting(scenario))
  simulation.run()
  return simulation.tally


def admitting(scenario: Scenario) -> Scenario:
  """The same, where the syncer admits all of its learners."""
  num, sync = scenario.learners.num, scenario.sync
  sync = dataclasses.replace(
    sync,
    max_learners=max(num, sync.max_learners),
    num_shards=max(num * sync.shards_per_learner, sync.num_shards),
  )
  return dataclasses.replace(scenario, sync=sync)
