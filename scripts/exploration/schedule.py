"""A schedule: settings and choices, drawn from (seed, index), nothing else.

A choice is a name and a number; the world reads the number as it needs. Any part
of a schedule is a schedule, so that one that breaks a law can be shrunk.
"""

import itertools
import random
from typing import Any, NamedTuple

from ddiloco_jax.protocol.rules import Rules

NUM_EVENTS = 200  # A schedule goes on until the machine has consumed so many.
NUM_CHOICES = 500

# Choice -> weight. What goes wrong is drawn apart, for each schedule.
_ORDINARY = {
  "flow": 30.0,  # A learner takes a step and exchanges all that waits.
  "everybody": 5.0,
  "train": 10.0,
  "up": 8.0,
  "down": 8.0,
  "fetch": 6.0,
  "push": 14.0,
  "merge": 10.0,
  "capture": 4.0,
  "tick": 8.0,
  "wait": 5.0,
  "beat": 2.0,
  "join": 5.0,
}
_FAULTS = {
  "cut": 2.0,  # A control stream breaks.
  "crash": 1.5,  # A learner's process dies, or is cut off and lives on.
  "leave": 0.5,
  "evict": 0.4,
  "stall": 3.0,  # A reply begins to arrive, and stops, or goes on.
  "again": 2.0,  # A reply is pushed once more.
  "ghost": 3.0,  # A process that is over speaks.
  "evil": 5.0,
  "exhaust": 0.6,
  "crash_syncer": 1.2,
  "snapshot": 1.0,  # The syncer's state gets onto its disk.
  "mark": 1.5,  # A consistent cut is asked for.
  "silence": 1.0,  # Time passes, and nobody speaks.
  "linger": 1.2,  # For over a lease some train, some only beat, some are away.
  "stop": 0.4,
}


class Choice(NamedTuple):
  name: str
  number: int


class Settings(NamedTuple):
  """What holds for a whole schedule.

  Attributes:
    rules: Of the machine.
    num_learners: Slots, each with at most one process that is not a ghost.
    tokens: Per step, of each slot.
    loudness: Norm per unit of learning rate, of each slot.
    max_replies: That a link states.
    own: Of each slot, whether it runs the project's own learner.
    durable: Every commit is on disk before it is published.
    ending: The schedule ends in a calm in which a merge must come ("calm"), in
      silence ("silence"), or in an orderly end ("stop").
  """

  rules: Rules
  num_learners: int = 3
  tokens: tuple[int, ...] = (100, 100, 100)
  loudness: tuple[float, ...] = (1.0, 1.0, 1.0)
  max_replies: int = 1
  own: tuple[bool, ...] = (True, True, True)
  durable: bool = True
  ending: str = "stop"


class Schedule(NamedTuple):
  settings: Settings
  choices: tuple[Choice, ...]


def draw(seed: int, index: int) -> Schedule:
  """The schedule of this name, the same on every machine."""
  rng = random.Random(f"{seed}/{index}")
  settings = _draw_settings(rng)
  weights = dict(_ORDINARY)
  # Most faults at once reach little: each schedule has some of them.
  for name, weight in _FAULTS.items():
    if rng.random() < 0.45:
      weights[name] = weight * rng.choice((0.5, 1.0, 3.0))
  totals = list(itertools.accumulate(weights.values()))
  names = rng.choices(list(weights), cum_weights=totals, k=NUM_CHOICES)
  return Schedule(
    settings, tuple(Choice(name, rng.getrandbits(40)) for name in names)
  )


def _draw_settings(rng: random.Random) -> Settings:
  num = rng.choice((3, 3, 3, 4, 5))
  rules = _draw_rules(rng, num)
  tokens = [rng.choice((100, 100, 100, 7, 0)) for _ in range(num)]
  if rng.random() < 0.8:
    tokens = [n or 100 for n in tokens]
  loudness = [1.0] * num
  if rng.random() < 0.2:
    loudness[rng.randrange(num)] = 1e6
  own = rng.choice((1.0, 1.0, 0.5, 0.0))
  return Settings(
    rules=rules,
    num_learners=num,
    tokens=tuple(tokens),
    loudness=tuple(loudness),
    max_replies=rng.choice((1, 1, 2, 3)),
    own=tuple(rng.random() < own for _ in range(num)),
    durable=rng.random() < 0.6,
    ending=rng.choice(("calm", "silence", "stop", "stop")),
  )


def _draw_rules(rng: random.Random, num_learners: int) -> Rules:
  num = rng.choice((1, 1, 2, 3, 4))
  waits = rng.random() < 0.15
  values: dict[str, Any] = {
    "num_fragments": num,
    "cycle_steps": num + rng.choice((0, 1, 3)),
    "max_open_rounds": rng.choice((1, 2, 2, 3)),
    "quorum": rng.choice((1, 1, 2, 2, num_learners)),
    "members": rng.choice(("live", "live", "reported")),
    "pace": rng.choice(("median", "median", "fastest")),
    "stale": rng.choice(("merge", "merge", "merge", "reject")),
    "max_staleness": rng.choice((0, 1, 2, 8, 8)),
    "grace_fraction": rng.choice((0.0, 0.8, 1.0)),
    "min_deadline_s": rng.choice((5.0, 5.0, 1.0)),
    "lease_s": rng.choice((5.0, 15.0)),
    "quorum_timeout_s": rng.choice((20.0, 60.0, 600.0)),
    "num_syncer_steps": rng.choice((0, 0, 0, 8, 30)),
    "num_tokens": rng.choice((0, 0, 0, 0, 1000, 4000)),
    "max_learners": rng.choice((num_learners, num_learners, num_learners - 1)),
    "num_shards": num_learners + rng.choice((-1, 0, 0, 2, num_learners)),
    "shards_per_learner": rng.choice((1, 2)),
    "shard_lease_s": rng.choice((0.0, 6.0, 6.0, 20.0)),
    "wait_for_publication": waits,
  }
  if waits:
    values["adoption_delay_steps"] = rng.choice((0, 0, 1, 2))
  elif rng.random() < 0.12:
    values["max_ahead"] = rng.choice((1, 3))
  values["quorum"] = min(values["quorum"], values["max_learners"])
  if rng.random() < 0.3:
    values["fragment_params"] = tuple(range(1, num + 1))
  return Rules(**values)
