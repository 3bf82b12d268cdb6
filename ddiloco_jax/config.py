"""A run's settings: each room's own frozen dataclass, composed, checked, saved.

A file in configs/ edits the ConfigDict of `default`; `freeze` turns it, once,
into a `Config`, and refuses unknown names, wrong types and settings that
contradict each other. What the syncer owns is replaced at a learner by what the
syncer says. (arXiv 2604.21428, Sec. 5 and App. B for the defaults.)
"""

import dataclasses
import difflib
import hashlib
import importlib.util
import json
import math
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, FieldReference, config_flags

from ddiloco_jax.algorithm.fragments import FragmentConfig
from ddiloco_jax.algorithm.merge import MergeConfig
from ddiloco_jax.algorithm.outer import OuterConfig
from ddiloco_jax.data.sources import DataConfig
from ddiloco_jax.data.tokens import BYTES, make_tokenizer
from ddiloco_jax.models.transformer import ModelConfig
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.training.evaluate import EvaluateConfig
from ddiloco_jax.training.mesh import MeshConfig
from ddiloco_jax.training.step import TrainConfig
from ddiloco_jax.wire.options import WireConfig

FLAG = "config"
# A learner takes these from the syncer (message Run), never from its flags.
SYNCER_OWNED = (
  "model",
  "sync",
  "fragments",
  "merge",
  "outer",
  "wire.up_format",
  "wire.down_format",
  "wire.chunk_bytes",
)


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
    checkpoint_every_s: Time between two checkpoints of the syncer.
    max_to_keep: Checkpoints kept.
    connect_timeout_s: How long a learner looks for its syncer at the start.
    max_solo_s: How long a joined learner goes on without one.
  """

  name: str = "run"
  directory: str = "runs/run"
  seed: int = 0
  num_steps: int = 1000
  max_steps: int = 0
  lr_index: str = "syncer"
  log_every_steps: int = 10
  checkpoint_every_steps: int = 0
  checkpoint_every_s: float = 60.0
  max_to_keep: int = 3
  connect_timeout_s: float = 120.0
  max_solo_s: float = 3600.0

  def __post_init__(self):
    _check(self, "directory", bool(self.directory), "a path")
    _check(self, "seed", 0 <= self.seed < 2**32, "in 0..2**32-1")
    for name in ("num_steps", "log_every_steps", "max_to_keep"):
      _check(self, name, getattr(self, name) >= 1, "at least 1")
    for name in ("max_steps", "checkpoint_every_steps"):
      _check(self, name, getattr(self, name) >= 0, "at least 0")
    for name in ("checkpoint_every_s", "connect_timeout_s"):
      _check(self, name, getattr(self, name) > 0, "above 0")
    known = self.lr_index in ("syncer", "own")
    _check(self, "lr_index", known, 'one of "syncer", "own"')


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


def default() -> Any:
  """The defaults of all sections as a ConfigDict; no name can be added.

  P is one setting with two names, `sync.num_fragments` and
  `fragments.num_fragments`: whoever sets one sets both.
  """
  cfg: Any = ConfigDict(_editable(Config()))
  cfg.fragments.num_fragments = cfg.sync.get_ref("num_fragments")
  return cfg.lock()


def freeze(cfg: ConfigDict | Mapping[str, Any]) -> Config:
  """Checks settings and fixes them.

  Args:
    cfg: Sections by name; what is left out has its default. An int is taken
      for a float and a list for a tuple; nothing else is converted.

  Raises:
    ValueError: an unknown name, a wrong type, a value out of range, or two
      settings that contradict each other.
  """
  values = cfg.to_dict() if isinstance(cfg, ConfigDict) else cfg
  config = _build(Config, values, "")
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


# --- as text -----------------------------------------------------------------


def to_dict(config: Config) -> dict[str, Any]:
  """The settings as values that JSON has, tuples apart."""
  return dataclasses.asdict(config)


def to_json(config: Config) -> str:
  """The settings as canonical JSON: equal settings give equal text."""
  return json.dumps(to_dict(config), sort_keys=True, indent=1, allow_nan=False)


def from_json(text: str) -> Config:
  """The settings that `to_json` wrote.

  Raises:
    ValueError: not JSON, or not settings that `freeze` takes.
  """
  return freeze(json.loads(text))


def digest(config: Config) -> str:
  """Lower-case hex SHA-256 of `to_json`."""
  return hashlib.sha256(to_json(config).encode()).hexdigest()


# --- what the syncer owns ------------------------------------------------------


def shared_json(config: Config) -> str:
  """The syncer's part of the settings, for `RunSpec.settings_json`."""
  values = to_dict(config)
  owned = {}
  for name in SYNCER_OWNED:
    section, _, key = name.partition(".")
    owned[name] = values[section][key] if key else values[section]
  return json.dumps(owned, sort_keys=True, allow_nan=False)


def with_shared(config: Config, text: str) -> tuple[Config, tuple[str, ...]]:
  """A learner's settings with the syncer's part put in.

  Args:
    config: The learner's own.
    text: What `shared_json` gave at the syncer.

  Returns:
    The new settings, and the names whose value the syncer has changed.
  """
  values = to_dict(config)
  for name, value in json.loads(text).items():
    section, _, key = name.partition(".")
    if key:
      values[section][key] = value
    else:
      values[section] = value
  new = freeze(values)
  names = [n for n in _names(new) if _get(new, n) != _get(config, n)]
  return new, tuple(names)


def syncer_owned(names: Sequence[str]) -> tuple[str, ...]:
  """Those of some dotted names that a learner may not set."""
  return tuple(
    name
    for name in names
    if any(name == own or name.startswith(own + ".") for own in SYNCER_OWNED)
  )


# --- the flag --------------------------------------------------------------------


def define_flag(
  flag_values: flags.FlagValues = flags.FLAGS, argv: list[str] | None = None
) -> None:
  """Defines --config=FILE and its overrides, --config.SECTION.NAME=VALUE.

  Args:
    flag_values: Where; tests have their own.
    argv: The command line, if not sys.argv.
  """
  config_flags.DEFINE_config_file(
    FLAG,
    None,
    "A file of configs/; --config.SECTION.NAME=VALUE overrides a setting.",
    flag_values=flag_values,
    sys_argv=argv,
  )
  flag_values[FLAG].parser = _FileParser(argv)


def parsed(flag_values: flags.FlagValues = flags.FLAGS) -> Config:
  """The settings of the command line, frozen.

  Raises:
    ValueError: as `freeze`, or there is no --config.
  """
  cfg = flag_values[FLAG].value
  if cfg is None:
    raise ValueError("--config is missing: give a file, --config=configs/X.py.")
  return freeze(cfg)


def overridden(
  flag_values: flags.FlagValues = flags.FLAGS,
) -> tuple[str, ...]:
  """The dotted names that were set on the command line."""
  flag: Any = flag_values[FLAG]
  return () if flag.value is None else tuple(flag.override_values)


def load_file(path: str) -> Any:
  """Runs a config file's `get_config()`; gives its ConfigDict, locked.

  Raises:
    ValueError: no such file, or its code sets what does not exist.
  """
  if not os.path.isfile(path):
    folder = os.path.dirname(path) or "."
    there = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    raise ValueError(
      f"no such file: {path!r}; it must be a Python file with a get_config()."
      + _nearest(os.path.basename(path), there, "The nearest there is")
    )
  spec = importlib.util.spec_from_file_location("ddiloco_jax_config", path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    return module.get_config().lock()
  except (AttributeError, KeyError, TypeError) as error:
    raise ValueError(f"{path}: {error}") from error


class _FileParser(flags.ArgumentParser):
  """Loads the file, and names what a misspelt override may have meant."""

  def __init__(self, argv: list[str] | None):
    self._argv = argv

  def parse(self, argument: str) -> ConfigDict:
    cfg = load_file(argument)
    names = list(_names(cfg))
    for arg in sys.argv if self._argv is None else self._argv:
      match = re.match(rf"--?(?:no)?{FLAG}\.([^=]*)", arg)
      if match and match[1] not in names:
        raise ValueError(_unknown(match[1], names))
    return cfg


# --- private -----------------------------------------------------------------------

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
  "sync.max_learners <= sync.num_shards": (
    "each learner reads a data shard of its own"
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
  return operator.attrgetter(name)(config)


def _names(config: Any) -> Iterator[str]:
  """The dotted names of all settings, without the sections themselves."""
  for section in (f.name for f in dataclasses.fields(Config)):
    part = getattr(config, section)
    keys = part.keys() if isinstance(part, ConfigDict) else _fields(type(part))
    for key in keys:
      yield f"{section}.{key}"


def _fields(cls: type) -> list[str]:
  return [field.name for field in dataclasses.fields(cls)]


def _editable(config: Any) -> dict[str, Any]:
  """Values for a ConfigDict; optional ones may hold any type until `freeze`."""
  values = {}
  hints = typing.get_type_hints(type(config))
  for name in _fields(type(config)):
    value = getattr(config, name)
    if dataclasses.is_dataclass(value):
      value = _editable(value)
    elif type(None) in typing.get_args(hints[name]):
      value = FieldReference(value, field_type=object)
    values[name] = value
  return values


def _build(cls: Any, values: Any, section: str) -> Any:
  if not isinstance(values, Mapping):
    raise ValueError(
      f"{section or 'settings'} is {values!r}: it must be a section, with "
      f"{', '.join(_fields(cls))}."
    )
  hints = typing.get_type_hints(cls)
  prefix = f"{section}." if section else ""
  for key in values:
    if key not in hints:
      raise ValueError(_unknown(f"{prefix}{key}", list(_names(Config()))))
  return cls(
    **{
      key: _convert(value, hints[key], f"{prefix}{key}")
      for key, value in values.items()
    }
  )


def _convert(value: Any, kind: Any, name: str, also: str = "") -> Any:
  """The value as the type of its field, or a ValueError."""
  arguments = typing.get_args(kind)
  if dataclasses.is_dataclass(kind):
    return _build(kind, value, name)
  if (
    isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
  ):
    if value is None:
      return None
    (inner,) = (k for k in arguments if k is not type(None))
    return _convert(value, inner, name, " or None")
  if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
    (item, _) = arguments  # Only tuple[X, ...] occurs.
    return tuple(_convert(v, item, f"{name}[{i}]") for i, v in enumerate(value))
  if kind is float and type(value) is int:
    return float(value)
  if type(value) is not kind or (kind is float and not math.isfinite(value)):
    wanted = (
      "a finite float" if kind is float else f"of type {_type_name(kind)}"
    )
    raise ValueError(
      f"{name} is {value!r} ({type(value).__name__}): it must be {wanted}{also}; "
      f"write --config.{name}=VALUE, with the equals sign."
    )
  return value


def _type_name(kind: Any) -> str:
  return kind.__name__ if typing.get_origin(kind) is None else str(kind)


def _unknown(name: str, names: list[str]) -> str:
  """Says what an unknown name may have meant, and what its section has."""
  section, _, key = name.rpartition(".")
  here = [n for n in names if n.startswith(section + ".")]
  same_key = [n for n in names if n.endswith("." + key)]
  sections = sorted({n.partition(".")[0] for n in names})
  if name in sections:
    keys = ", ".join(n for n in names if n.startswith(name + "."))
    return f"{name!r} is a section, not a setting; it has {keys}."
  return (
    f"there is no setting {name!r}."
    + _nearest(name, same_key or here or names, "The nearest is")
    + (f" Section {section} has " if here else " Sections are ")
    + ", ".join([n.rpartition(".")[2] for n in here] or sections)
    + "."
  )


def _nearest(name: str, names: list[str], words: str) -> str:
  match = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
  return f" {words} {match[0]!r}." if match else ""
