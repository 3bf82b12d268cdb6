"""What settings there are, and which contradict each other.

(arXiv 2604.21428, Sec. 5 and App. B for the defaults.)
"""

import dataclasses
import math
import operator
from typing import Any

from ddiloco_jax.algorithm.fragments import FragmentConfig
from ddiloco_jax.algorithm.merge import MergeConfig
from ddiloco_jax.algorithm.outer import OuterConfig
from ddiloco_jax.config import strict
from ddiloco_jax.data.sources import DataConfig
from ddiloco_jax.data.tokens import BYTES, make_tokenizer
from ddiloco_jax.models.transformer import ModelConfig
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.training.evaluate import EvaluateConfig
from ddiloco_jax.training.mesh import MeshConfig
from ddiloco_jax.training.step import TrainConfig
from ddiloco_jax.wire.options import WireConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
  """What concerns a process and its records, not the algorithm.

  Attributes:
    name: Of the run, for people.
    directory: Where everything that the run writes lies.
    seed: Draws the first parameters (at the syncer) and the order of data.
    num_steps: Length of a plain training run; with a syncer, the syncer says
      when a run ends.
    max_steps: Own steps after which a learner's data counts as used up; 0 for
      no such bound.
    lr_index: What the inner schedule counts: the "syncer"'s step, or the
      learner's "own".
    log_every_steps: Steps between two lines of a metrics file.
    checkpoint_every_steps: A training process's own steps between two of its
      checkpoints; 0 for none on the way.
    durability: What a syncer that was killed comes back with: every "commit",
      each on disk before it is published, or the newest "snapshot".
    on_write_error: What a process does when a commit or a checkpoint cannot be
      written: "stop", or "continue" without it and try again with the next.
    accept_loss: Let a syncer go on with `--restore` although versions that
      learners can have been told of are damaged or missing on disk.
    standby_lease_s: Without a heartbeat of the syncer for so long, one that was
      started with `--standby` takes over; the syncer itself steps down after
      half of it. The same at both; 0 for no heartbeat and no standby.
    checkpoint_every_s: Time between two checkpoints of the syncer.
    snapshot_every_merges: Merges between two consistent snapshots of the
      whole run; 0 for none but those that an operator takes.
    max_to_keep: Checkpoints kept.
    record_payloads: Keep what a replay of the tensors needs: at the syncer the
      merged replies, at learners what each step was taken with.
    connect_timeout_s: How long a learner looks for its syncer at the start.
    max_solo_s: How long a joined learner goes on without one.
    stuck_s: A training process that passes no step boundary and no wait for so
      long, its start, restore and compilation included, ends with a code of
      its own; 0 for no such bound.
    step_s: A training step takes at least so long: where many learners share
      few cores, each can stand for one whose accelerator leaves the cores free.
    loss_spike_factor: A learner whose loss is beyond so many times its running
      median, three steps in a row, or not finite, drops what it has not merged
      and starts over from the global state; 0 for never.
    state_address: Where a learner serves its inner optimizer's state to peers,
      HOST:PORT; "" for a free port of the address that reaches the syncer, "off"
      for nowhere. Of a wildcard (0.0.0.0), peers are told that address.
    recover_s: How long a learner that joins a run under way bears no byte from
      a peer, and, beyond the time that its state takes at 1 MB/s, waits for the
      whole, before it takes its own checkpoint's moments or fresh ones; 0 to
      ask no peer.
  """

  name: str = "run"
  directory: str = "runs/run"
  seed: int = 0
  num_steps: int = 1000
  max_steps: int = 0
  lr_index: str = "syncer"
  log_every_steps: int = 10
  checkpoint_every_steps: int = 0
  durability: str = "commit"
  on_write_error: str = "stop"
  accept_loss: bool = False
  standby_lease_s: float = 0.0
  checkpoint_every_s: float = 60.0
  snapshot_every_merges: int = 0
  max_to_keep: int = 3
  record_payloads: bool = False
  connect_timeout_s: float = 120.0
  max_solo_s: float = 3600.0
  stuck_s: float = 1800.0
  step_s: float = 0.0
  loss_spike_factor: float = 0.0
  state_address: str = ""
  recover_s: float = 30.0

  def __post_init__(self):
    _check(self, "directory", bool(self.directory), "a path")
    _check(self, "seed", 0 <= self.seed < 2**32, "in 0..2**32-1")
    for name in ("num_steps", "log_every_steps", "max_to_keep"):
      _check(self, name, getattr(self, name) >= 1, "at least 1")
    for name in (
      "max_steps",
      "checkpoint_every_steps",
      "recover_s",
      "snapshot_every_merges",
      "stuck_s",
    ):
      _check(self, name, getattr(self, name) >= 0, "at least 0")
    for name in ("checkpoint_every_s", "connect_timeout_s"):
      _check(self, name, getattr(self, name) > 0, "above 0")
    a_day = 0 <= self.step_s <= 86_400
    _check(self, "step_s", a_day, "from 0 to 86400, a day")
    lease_s = self.standby_lease_s
    is_kept = lease_s == 0 or lease_s >= 0.1
    _check(self, "standby_lease_s", is_kept, "0, or at least 0.1")
    factor = self.loss_spike_factor
    is_known = factor == 0 or factor > 1
    _check(self, "loss_spike_factor", is_known, "0, or above 1")
    known = self.lr_index in ("syncer", "own")
    _check(self, "lr_index", known, 'one of "syncer", "own"')
    known = self.durability in ("commit", "snapshot")
    _check(self, "durability", known, 'one of "commit", "snapshot"')
    known = self.on_write_error in ("stop", "continue")
    _check(self, "on_write_error", known, 'one of "stop", "continue"')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
  """All settings of a run; a module is given its own section only."""

  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)
  sync: Rules = dataclasses.field(default_factory=Rules)
  fragments: FragmentConfig = dataclasses.field(default_factory=FragmentConfig)
  merge: MergeConfig = dataclasses.field(default_factory=MergeConfig)
  outer: OuterConfig = dataclasses.field(default_factory=OuterConfig)
  wire: WireConfig = dataclasses.field(default_factory=WireConfig)
  run: RunConfig = dataclasses.field(default_factory=RunConfig)


def freeze(cfg: Any) -> Config:
  """Checks settings and fixes them.

  Args:
    cfg: Sections by name, as a mapping or a ConfigDict; see `strict.build`.

  Raises:
    ValueError: an unknown name, a wrong type, a value out of range, or two
      settings that contradict each other.
  """
  values = cfg.to_dict() if hasattr(cfg, "to_dict") else cfg
  config = strict.build(Config, values)
  check(config)
  return config


def check(config: Config) -> None:
  """Refuses settings that contradict each other.

  Raises:
    ValueError: names both, with their values and the inequality.
  """
  for inequality, reason in _RELATIONS.items():
    left, relation, right = inequality.split()
    a, b = _get(config, left), _get(config, right)
    if not _COMPARE[relation](a, b):
      raise ValueError(
        f"{left}={a} and {right}={b} contradict each other: it must hold that "
        f"{inequality} ({reason}). Change one of them."
      )
  if config.data.tokenizer == BYTES:
    check_vocab(config)


def check_vocab(config: Config) -> None:
  """Refuses a model that has no row for some token; reads the tokenizer file.

  Raises:
    ValueError: `model.vocab_size` is less than the tokenizer's.
  """
  needed = make_tokenizer(config.data.tokenizer).vocab_size
  if config.model.vocab_size < needed:
    raise ValueError(
      f"model.vocab_size is {config.model.vocab_size}: it must be at least "
      f"{needed}, the vocabulary of data.tokenizer={config.data.tokenizer!r}."
    )


_COMPARE = {"<=": operator.le, "<": operator.lt, "==": operator.eq}
_RELATIONS = {
  "sync.num_fragments == fragments.num_fragments": (
    "both are P, the number of fragments"
  ),
  "fragments.num_fragments <= sync.cycle_steps": (
    "each fragment has a slot of its own among the H steps of a cycle"
  ),
  "sync.quorum <= sync.max_learners": (
    "a quorum of more learners than are admitted is never reached"
  ),
  "sync.max_learners*sync.shards_per_learner <= sync.num_shards": (
    "each learner reads data shards of its own"
  ),
  "sync.adoption_delay_steps < sync.cycle_steps": (
    "a publication is adopted before its fragment's next slot"
  ),
  "wire.reconnect_max_s < sync.lease_s": (
    "a learner must be able to come back before its lease ends"
  ),
  "sync.lease_s < sync.quorum_timeout_s": (
    "a run must not end before a silent learner is known to be gone"
  ),
  "sync.lease_s < run.max_solo_s": (
    "a learner must not give up a syncer that still counts on it"
  ),
  "run.standby_lease_s < run.max_solo_s": (
    "a learner must not give up a run that a standby takes over"
  ),
  "wire.keepalive_s < run.max_solo_s": (
    "a learner must probe a silent connection before it gives it up"
  ),
}


def _check(cfg: RunConfig, name: str, holds: bool, rule: str) -> None:
  if not holds:
    raise ValueError(
      f"run.{name} is {getattr(cfg, name)!r}: it must be {rule}."
    )


def _get(config: Any, name: str) -> Any:
  """A setting, or a product of some."""
  return math.prod(operator.attrgetter(x)(config) for x in name.split("*"))
