"""Goodput of each system on fleets from 150,000 chips to 2.4 million.

The parameters of the scenario are fitted to half of the paper's cells, those of one
colour of a chessboard; the others are held out. (arXiv 2604.21428, Table 1.)
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ddiloco_jax.chaos.scenario import Scenario
from ddiloco_jax.chaos.systems import data_parallel, decoupled

SIZES = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
# Goodput, percent.
PAPER: Mapping[str, tuple[int, ...]] = {
  "data-parallel, not elastic": (72, 57, 38, 27, 18),
  "data-parallel, elastic": (88, 80, 69, 58, 40),
  "decoupled, M=2": (94, 88, 80, 70, 54),
  "decoupled, M=4": (96, 93, 89, 82, 73),
  "decoupled, M=8": (98, 96, 94, 88, 80),
  "decoupled, M=16": (99, 98, 96, 93, 86),
}
_ERROR = 0.002  # Of a cell's goodput, that sampling may leave: one deviation.
_COST_S = 25.0  # Roughly what an interruption costs, to know how many to draw.
_LEAST = 100  # Interruptions of a cell.

Cell = tuple[str, Scenario]


def cells(scenario: Scenario) -> list[Cell]:
  """Every cell of the table: "SYSTEM/CHIPS", and its scenario."""
  return [
    (f"{system}/{chips}", _cell(scenario, system, chips))
    for system in PAPER
    for chips in SIZES
  ]


def play(cell: Cell) -> dict[str, float]:
  """Goodput and the rest of one cell."""
  name, scenario = cell
  if name.startswith("data-parallel"):
    is_elastic = "not elastic" not in name
    return data_parallel.simulate(scenario, elastic=is_elastic).figures()
  return decoupled.simulate(scenario).figures()


def is_fitted(system: str, chips: int) -> bool:
  """Whether the parameters were fitted to this cell."""
  return (list(PAPER).index(system) + SIZES.index(chips)) % 2 == 1


def conclude(
  scenario: Scenario, played: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
  """The table beside the paper's, and how far they are apart."""
  table: dict[str, dict[str, float]] = {}
  apart: dict[bool, list[float]] = {True: [], False: []}
  uptimes: dict[str, list[float]] = {}
  for system, row in PAPER.items():
    table[system] = {}
    for chips, paper in zip(SIZES, row):
      figures = played[f"{system}/{chips}"]
      points = 100 * figures["goodput"]
      table[system][str(chips)] = round(points, 2)
      apart[is_fitted(system, chips)].append(abs(points - paper))
      uptimes.setdefault(system, []).append(figures["uptime"])
  every = [*apart[True], *apart[False]]
  return {
    "table": table,
    "paper": {system: list(row) for system, row in PAPER.items()},
    "worst_cell_points": max(every),
    "mean_points": sum(every) / len(every),
    "fitted_worst_points": max(apart[True]),
    "heldout_worst_points": max(apart[False]),
    "heldout_mean_points": sum(apart[False]) / len(apart[False]),
    "uptime_min_m4": min(uptimes["decoupled, M=4"]),
    "uptime_min_m8": min(
      *uptimes["decoupled, M=8"], *uptimes["decoupled, M=16"]
    ),
    "events": sum(figures["events"] for figures in played.values()),
  }


def _cell(scenario: Scenario, system: str, chips: int) -> Scenario:
  num = int(system.partition("M=")[2] or 1)
  fleet = dataclasses.replace(scenario.fleet, chips=chips)
  lost = 1 - fleet.mtbf_s * num / (fleet.mtbf_s * num + _COST_S)
  hits = max(_LEAST, math.ceil((lost * (1 - lost) / _ERROR) ** 2))
  run = dataclasses.replace(scenario.run, duration_s=hits * fleet.mtbf_s)
  learners = dataclasses.replace(scenario.learners, num=num)
  return dataclasses.replace(scenario, run=run, learners=learners, fleet=fleet)
