"""One scenario, as it is."""

from collections.abc import Mapping
from typing import Any

from ddiloco_jax.chaos.scenario import Scenario
from ddiloco_jax.chaos.systems import decoupled

Cell = tuple[str, Scenario]


def cells(scenario: Scenario) -> list[Cell]:
  return [("decoupled", scenario)]


def play(cell: Cell) -> dict[str, float]:
  return decoupled.simulate(cell[1]).figures()


def conclude(
  scenario: Scenario, played: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
  return dict(played["decoupled"])
