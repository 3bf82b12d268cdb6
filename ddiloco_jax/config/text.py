"""Settings as text: the record of a run, and what a syncer tells its learners."""

import dataclasses
import hashlib
import json
import operator
from collections.abc import Sequence
from typing import Any

from ddiloco_jax.config import strict
from ddiloco_jax.config.settings import Config, freeze

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
  "run.record_payloads",
)


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
  changed = [
    name
    for name in strict.names(Config)
    if operator.attrgetter(name)(new) != operator.attrgetter(name)(config)
  ]
  return new, tuple(changed)


def syncer_owned(names: Sequence[str]) -> tuple[str, ...]:
  """Those of some dotted names that a learner may not set."""
  return tuple(
    name
    for name in names
    if any(name == own or name.startswith(own + ".") for own in SYNCER_OWNED)
  )
