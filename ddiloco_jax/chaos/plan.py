"""What fails when: a seeded list of faults, the same for real and for virtual.

Pure: no clock, no processes. `launch/inject.py` does it to real processes.
(arXiv 2604.21428, Sec. 5: failures are drawn, and hit one learner at a time.)
"""

import dataclasses
import enum
import random
from collections.abc import Iterator, Mapping
from typing import Any

SYNCER = -1  # As a target; learners are 0, 1, ...
MAX_S = 604_800.0  # A week: whatever lasts longer is a slip of the keys.
MAX_FAULTS_PER_HOUR = 36_000.0  # Ten a second; fewer can be done to processes.


class Kind(enum.StrEnum):
  KILL = "kill"  # SIGKILL; started again after `lasts_s`.
  STOP = "stop"  # Stands still and goes on: a straggler.
  PARTITION = "partition"  # Nothing passes between learner and syncer.
  SLOW = "slow"  # Latency and little bandwidth.
  DISK = "disk"  # Its writes fail.
  CLOCK = "clock"  # Its wall clock jumps, and jumps back.


# Cards of a deck that is shuffled anew when it is used up, so that a short
# storm has the mix too: 20 % kills, 25 % stops, 20 % partitions, 25 % slow
# links, 10 % disk or clock.
MIX: Mapping[Kind, int] = {
  Kind.KILL: 4,
  Kind.STOP: 5,
  Kind.PARTITION: 4,
  Kind.SLOW: 5,
  Kind.DISK: 1,
  Kind.CLOCK: 1,
}
KILLS_ONLY: Mapping[Kind, int] = {Kind.KILL: 1}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
  """One fault of one process.

  Attributes:
    at_s: When it begins, seconds since the storm did.
    kind: See Kind.
    target: A learner's number, or SYNCER.
    lasts_s: Until it ends; for a kill, until the process is started again.
    half_open: Of a partition: the syncer's end of every connection is closed,
      and the learner's stays open and silent.
    latency_s: Of a slow link, each way.
    bytes_per_s: Of a slow link, each way.
    jump_s: Of a clock: how far it jumps, and in the end back.
  """

  at_s: float
  kind: Kind
  target: int
  lasts_s: float
  half_open: bool = False
  latency_s: float = 0.0
  bytes_per_s: int = 0
  jump_s: float = 0.0

  @property
  def end_s(self) -> float:
    return self.at_s + self.lasts_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChaosConfig:
  """What a storm is drawn from.

  Attributes:
    seed: Of all draws; each thing draws from a sequence of its own.
    num_learners: Targets.
    duration_s: Of the storm.
    faults_per_hour: Of learners, all together.
    syncer_kills: Over the storm, one in each equal part of it.
    mix: Kind -> cards in the deck.
    shortest_s, longest_s: Bounds of whatever ends by itself.
    down_s: From a learner's kill to its next start.
    syncer_down_s: Likewise for the syncer.
  """

  seed: int = 0
  num_learners: int = 8
  duration_s: float = 300.0
  faults_per_hour: float = 600.0
  syncer_kills: int = 0
  mix: Mapping[Kind, int] = dataclasses.field(default_factory=lambda: MIX)
  shortest_s: float = 3.0
  longest_s: float = 10.0
  down_s: float = 2.0
  syncer_down_s: float = 5.0

  def __post_init__(self):
    for name, least in (("num_learners", 1), ("syncer_kills", 0)):
      if getattr(self, name) < least:
        raise ValueError(
          f"{name} is {getattr(self, name)}; it must be at least {least}"
        )
    for name in (
      "duration_s",
      "shortest_s",
      "longest_s",
      "down_s",
      "syncer_down_s",
    ):
      if not 0 < getattr(self, name) <= MAX_S:
        raise ValueError(
          f"{name} is {getattr(self, name)}; it must be above 0 and at most"
          f" {MAX_S:.0f} s, a week: give another"
        )
    if not 0 <= self.faults_per_hour <= MAX_FAULTS_PER_HOUR:
      raise ValueError(
        f"faults_per_hour is {self.faults_per_hour}; it must be at least 0 and"
        f" at most {MAX_FAULTS_PER_HOUR:.0f}, ten a second: give fewer, or 0 for"
        " none"
      )
    if self.longest_s < self.shortest_s:
      raise ValueError(
        f"longest_s {self.longest_s} is below shortest_s {self.shortest_s}"
      )
    if self.syncer_kills > self.duration_s / (2 * self.syncer_down_s):
      raise ValueError(
        f"{self.syncer_kills} kills of the syncer, each with"
        f" {self.syncer_down_s:g} s without one, do not fit into"
        f" {self.duration_s:g} s: kill less often, or storm longer"
      )


def plan_faults(cfg: ChaosConfig) -> tuple[Fault, ...]:
  """Draws a storm: in order of time, no learner hit by two faults at once.

  Where all learners are hit already, a fault waits for the first that is free;
  one that would begin after the storm's end is left out.
  """
  return tuple(
    sorted(
      (*_learner_faults(cfg), *_syncer_faults(cfg)),
      key=lambda fault: (fault.at_s, fault.target),
    )
  )


def to_dict(fault: Fault) -> dict[str, Any]:
  """A fault as JSON values; what does not concern its kind is left out."""
  values = dataclasses.asdict(fault)
  always = ("at_s", "kind", "target", "lasts_s")
  return {k: v for k, v in values.items() if v or k in always}


def _learner_faults(cfg: ChaosConfig) -> Iterator[Fault]:
  draws = random.Random(f"faults/{cfg.seed}")
  num = round(cfg.faults_per_hour * cfg.duration_s / 3600)
  # A Poisson process, given how many there are.
  times = sorted(draws.uniform(0.0, cfg.duration_s) for _ in range(num))
  kinds = _deal(draws, cfg.mix)
  free_at = [0.0] * cfg.num_learners
  for time_s in times:
    kind = next(kinds)
    at_s = max(time_s, min(free_at))
    target = draws.choice([n for n, t in enumerate(free_at) if t <= at_s])
    fault = _draw(draws, cfg, kind, target, at_s)
    if at_s < cfg.duration_s:
      free_at[target] = fault.end_s
      yield fault


def _deal(draws: random.Random, mix: Mapping[Kind, int]) -> Iterator[Kind]:
  deck = [kind for kind, cards in mix.items() for _ in range(cards)]
  while True:
    draws.shuffle(deck)
    yield from deck


def _draw(
  draws: random.Random, cfg: ChaosConfig, kind: Kind, target: int, at_s: float
) -> Fault:
  """Draws the same number of values for every kind."""
  lasts_s = draws.uniform(cfg.shortest_s, cfg.longest_s)
  half_open = draws.random() < 0.25
  latency_s = draws.uniform(0.02, 0.3)
  bytes_per_s = round(10 ** draws.uniform(4.7, 6.0))  # 50 kB/s to 1 MB/s.
  jump_s = draws.choice((-86_400.0, -3_600.0, 3_600.0, 86_400.0))
  is_slow = kind is Kind.SLOW
  return Fault(
    at_s=at_s,
    kind=kind,
    target=target,
    lasts_s=cfg.down_s if kind is Kind.KILL else lasts_s,
    half_open=half_open and kind is Kind.PARTITION,
    latency_s=latency_s if is_slow else 0.0,
    bytes_per_s=bytes_per_s if is_slow else 0,
    jump_s=jump_s if kind is Kind.CLOCK else 0.0,
  )


def _syncer_faults(cfg: ChaosConfig) -> Iterator[Fault]:
  draws = random.Random(f"syncer/{cfg.seed}")
  part_s = cfg.duration_s / max(1, cfg.syncer_kills)
  for n in range(cfg.syncer_kills):
    # Not at the edges of its part: it is back before the next, or the end.
    at_s = (n + draws.uniform(0.2, 0.5)) * part_s
    yield Fault(
      at_s=at_s, kind=Kind.KILL, target=SYNCER, lasts_s=cfg.syncer_down_s
    )
