"""All chips in one SPMD job: an interruption stops all of them."""

from ddiloco_jax.chaos.job import Fleet
from ddiloco_jax.chaos.scenario import Scenario, StepTimes
from ddiloco_jax.chaos.tally import Tally


def simulate(scenario: Scenario, *, elastic: bool) -> Tally:
  """Steps until the run's end.

  Args:
    scenario: Its learners are one.
    elastic: It goes on without the slices that are away, and takes them back;
      else it stands until they are repaired.
  """
  run = scenario.run
  fleet = Fleet(scenario.fleet, scenario.repair, run.seed, elastic=elastic)
  times = StepTimes(scenario.learners, run.seed)
  tally, now = Tally(run.duration_s), 0.0
  while now < run.duration_s:
    step = fleet.next_step(0, now, times.draw(0))
    if step.start_s < run.duration_s:
      tally.note_step(0, step)
    now = step.end_s
  return tally
