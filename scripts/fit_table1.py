"""Fits what an interruption costs to half of the paper's Table 1.

  python scripts/fit_table1.py --minutes=20 --seed=2

A random walk over the costs of configs/sim/table1.py from where they are: what
lowers the worst and the mean error of the fitted cells is kept, and printed with
the errors of the cells held out. One job alone is played for each load, chips per
learner: learners that wait for nobody have the goodput of such a job.
"""

import argparse
import dataclasses
import math
import random
import sys
import time
from collections.abc import Mapping

from ddiloco_jax.chaos.scenario import Scenario
from ddiloco_jax.chaos.studies import table1
from ddiloco_jax.chaos.systems import data_parallel
from ddiloco_jax.launch import simulating

# Setting -> section; the detection is told from the downscale by no figure.
FREE = {
  "downscale_s": "fleet",
  "upscale_s": "fleet",
  "upscale_every_s": "fleet",
  "slice_chips": "fleet",
  "mean_s": "repair",
  "step_s": "learners",
}
SPREAD = 0.06  # Of a step of the walk, for each setting.


def errors(scenario: Scenario) -> dict[tuple[str, int], float]:
  """Points that each cell's goodput is off, (system, chips) -> points."""
  known: dict[tuple[int, bool], float] = {}
  found = {}
  for name, cell in table1.cells(scenario):
    system = name.partition("/")[0]
    chips, elastic = cell.fleet.chips, "not elastic" not in system
    load = chips // cell.learners.num
    if (load, elastic) not in known:
      # As many interruptions as the whole fleet has in the cell.
      long_s = cell.run.duration_s * cell.learners.num
      alone = dataclasses.replace(
        cell,
        fleet=dataclasses.replace(cell.fleet, chips=load),
        run=dataclasses.replace(cell.run, duration_s=long_s),
      )
      tally = data_parallel.simulate(alone, elastic=elastic)
      known[load, elastic] = 100 * tally.goodput
    paper = table1.PAPER[system][table1.SIZES.index(chips)]
    found[system, chips] = known[load, elastic] - paper
  return found


def summary(
  found: Mapping[tuple[str, int], float], *, fitted: bool
) -> tuple[float, float]:
  """The worst and the mean error of one half."""
  apart = [
    abs(error)
    for cell, error in found.items()
    if table1.is_fitted(*cell) == fitted
  ]
  return max(apart), sum(apart) / len(apart)


def step(scenario: Scenario, draws: random.Random) -> Scenario:
  """The scenario with each free setting a little different."""
  for name, section in FREE.items():
    part = getattr(scenario, section)
    value = getattr(part, name) * math.exp(draws.gauss(0, SPREAD))
    value = max(1, round(value)) if name == "slice_chips" else value
    part = dataclasses.replace(part, **{name: value})
    scenario = dataclasses.replace(scenario, **{section: part})
  return scenario


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--minutes", type=float, default=10.0)
  parser.add_argument("--seed", type=int, default=0)
  flags = parser.parse_args()
  draws = random.Random(flags.seed)
  end_at = time.monotonic() + 60 * flags.minutes
  scenario = simulating.read_scenario("configs/sim/table1.py", ())
  best, tried = None, scenario
  while best is None or time.monotonic() < end_at:
    found = errors(tried)
    cost = sum(summary(found, fitted=True))
    if best is None or cost < best:
      best, scenario = cost, tried
      worst, mean = summary(found, fitted=True)
      held_worst, held_mean = summary(found, fitted=False)
      values = ", ".join(
        f"{name}={getattr(getattr(scenario, section), name):.4g}"
        for name, section in FREE.items()
      )
      print(
        f"fitted: worst {worst:.2f}, mean {mean:.2f}; held out: worst"
        f" {held_worst:.2f}, mean {held_mean:.2f}; {values}",
        flush=True,
      )
    tried = step(scenario, draws)
  return 0


if __name__ == "__main__":
  sys.exit(main())
