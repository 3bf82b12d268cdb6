"""What is simulated: learners, their fleet, its repair, their links, the rules."""

import dataclasses

import numpy as np

from ddiloco_jax.chaos.fleet import FleetConfig
from ddiloco_jax.chaos.repair import RepairConfig
from ddiloco_jax.chaos.traffic import LinkConfig
from ddiloco_jax.protocol.rules import Rules

_DRAWS = 4096  # At once.
_LEAST = 0.1  # Of a step's mean time: no draw is shorter.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
  """How long, and what is drawn.

  Attributes:
    study: What is shown of it; one of chaos.studies.
    seed: Of all draws.
    duration_s: Of virtual time, where the study does not say.
  """

  study: str = "single"
  seed: int = 0
  duration_s: float = 86_400.0

  def __post_init__(self):
    if self.seed < 0:
      raise ValueError(f"run.seed is {self.seed}: it must be at least 0.")
    if not 0 < self.duration_s < float("inf"):
      raise ValueError(
        f"run.duration_s is {self.duration_s}: it must be above 0, and finite."
      )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LearnersConfig:
  """Learners, each with an equal share of the fleet.

  Attributes:
    num: M.
    step_s: A step of one at full speed.
    step_spread: Standard deviation of a step's time, as a share of it.
    slowdowns: Per learner, its step time over step_s; those not named have 1.
    tokens_per_step: Of one with all of its chips.
    num_params: Of the model; fragments are alike.
    merge_s: At the syncer, from the last reply to the new version.
  """

  num: int = 8
  step_s: float = 30.0
  step_spread: float = 0.01
  slowdowns: tuple[float, ...] = ()
  tokens_per_step: int = 1_000_000
  num_params: int = 5_000_000_000
  merge_s: float = 0.5

  def __post_init__(self):
    for name, least in (("num", 1), ("tokens_per_step", 1), ("num_params", 1)):
      if getattr(self, name) < least:
        raise ValueError(
          f"learners.{name} is {getattr(self, name)}: it must be at least"
          f" {least}."
        )
    for name, holds, rule in (
      ("step_s", 0 < self.step_s < float("inf"), "above 0, and finite"),
      ("step_spread", 0 <= self.step_spread < 1, "in 0..1, without 1"),
      ("merge_s", 0 <= self.merge_s < float("inf"), "at least 0, and finite"),
      (
        "slowdowns",
        len(self.slowdowns) <= self.num and all(x > 0 for x in self.slowdowns),
        "factors above 0, at most one for each learner",
      ),
    ):
      if not holds:
        raise ValueError(
          f"learners.{name} is {getattr(self, name)!r}: it must be {rule}."
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
  """All that a simulation depends on.

  Attributes:
    sync: What the syncer decides by; max_learners and num_shards are raised to
      the number of learners.
  """

  run: RunConfig = dataclasses.field(default_factory=RunConfig)
  learners: LearnersConfig = dataclasses.field(default_factory=LearnersConfig)
  fleet: FleetConfig = dataclasses.field(default_factory=FleetConfig)
  repair: RepairConfig = dataclasses.field(default_factory=RepairConfig)
  link: LinkConfig = dataclasses.field(default_factory=LinkConfig)
  sync: Rules = dataclasses.field(default_factory=Rules)


class StepTimes:
  """Draws what each step of each learner takes."""

  def __init__(self, cfg: LearnersConfig, seed: int):
    slowdowns = (*cfg.slowdowns, *(1.0,) * (cfg.num - len(cfg.slowdowns)))
    self._mean_s = [cfg.step_s * slowdown for slowdown in slowdowns]
    self._spread = cfg.step_spread
    self._draws = np.random.default_rng([seed, 1])
    self._factors: list[float] = []

  def draw(self, n: int) -> float:
    """Of the next step of learner n, seconds."""
    if not self._factors:
      draws = self._draws.normal(1.0, self._spread, _DRAWS)
      self._factors = np.maximum(draws, _LEAST).tolist()
    return self._mean_s[n] * self._factors.pop()
