"""Learners of two speeds: what a quorum of all, of one, and the grace window do.

(arXiv 2604.21428, Sec. 5.)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ddiloco_jax.chaos.scenario import Scenario
from ddiloco_jax.chaos.systems import decoupled

# Goodput, percent, of the learners at full speed: those that would wait.
PAPER: Mapping[str, int] = {"K=M": 84, "K=1": 100, "K=1, grace": 100}

Cell = tuple[str, Scenario]


def cells(scenario: Scenario) -> list[Cell]:
  """K = M waits, at most tau steps ahead; the others never do."""
  sync, num = scenario.sync, scenario.learners.num
  variants = {
    "K=M": {"quorum": num, "max_ahead": sync.max_open_rounds},
    "K=1": {"quorum": 1, "grace_fraction": 0.0},
    "K=1, grace": {"quorum": 1},
  }
  return [
    (
      name,
      dataclasses.replace(scenario, sync=dataclasses.replace(sync, **changes)),
    )
    for name, changes in variants.items()
  ]


def play(cell: Cell) -> dict[str, Any]:
  tally = decoupled.simulate(cell[1])
  return {**tally.figures(), "goodput_by_learner": tally.goodput_by_job}


def conclude(
  scenario: Scenario, played: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
  """Goodput of the fastest learners, of all, and contributors per merge."""
  cfg = scenario.learners
  slowdowns = (*cfg.slowdowns, *(1.0,) * (cfg.num - len(cfg.slowdowns)))
  fast = [n for n in range(cfg.num) if slowdowns[n] == min(slowdowns)]
  table = {}
  for name, figures in played.items():
    each = figures["goodput_by_learner"]
    table[name] = {
      "goodput_fast": 100 * sum(each[n] for n in fast) / len(fast),
      "goodput_mean": 100 * figures["goodput"],
      "contributors_mean": figures["contributors_mean"],
    }
  apart = [
    abs(table[name]["goodput_fast"] - paper) for name, paper in PAPER.items()
  ]
  return {
    "table": table,
    "paper_goodput": dict(PAPER),
    "worst_points": max(apart),
    "grace_over_none_contributors": (
      table["K=1, grace"]["contributors_mean"]
      / table["K=1"]["contributors_mean"]
    ),
  }
