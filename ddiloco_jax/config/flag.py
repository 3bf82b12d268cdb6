"""A file of configs/ and its overrides on a command line.

A file edits the ConfigDict of `default`: the one place that knows ml_collections.
"""

import dataclasses
import importlib.util
import os
import re
import sys
import typing
from collections.abc import Callable
from typing import Any

from absl import flags
from ml_collections import ConfigDict, FieldReference, config_flags

from ddiloco_jax.config import strict
from ddiloco_jax.config.settings import Config, freeze

FLAG = "config"


def default() -> Any:
  """The defaults of all sections as a ConfigDict; no name can be added.

  P is one setting with two names, `sync.num_fragments` and
  `fragments.num_fragments`: whoever sets one sets both.
  """
  cfg = default_of(Config()).unlock()
  cfg.fragments.num_fragments = cfg.sync.get_ref("num_fragments")
  return cfg.lock()


def default_of(sections: Any) -> Any:
  """Those of any dataclass whose fields are dataclasses, likewise."""
  cfg: Any = ConfigDict(_editable(sections))
  return cfg.lock()


def define_flag(
  flag_values: flags.FlagValues = flags.FLAGS,
  argv: list[str] | None = None,
  sections: Any = Config,
) -> None:
  """Defines --config=FILE and its overrides, --config.SECTION.NAME=VALUE.

  Args:
    flag_values: Where; tests have their own.
    argv: The command line, if not sys.argv.
    sections: The dataclass that has them.
  """
  config_flags.DEFINE_config_file(
    FLAG,
    None,
    "A file of configs/; --config.SECTION.NAME=VALUE overrides a setting.",
    flag_values=flag_values,
    sys_argv=argv,
  )
  flag_values[FLAG].parser = _FileParser(argv, sections)


def parsed(
  flag_values: flags.FlagValues = flags.FLAGS,
  freeze: Callable[[Any], Any] = freeze,
) -> Any:
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
      + strict.nearest(os.path.basename(path), there, "The nearest there is")
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

  def __init__(self, argv: list[str] | None, sections: Any):
    self._argv, self._sections = argv, sections

  def parse(self, argument: str) -> ConfigDict:
    cfg = load_file(argument)
    names = tuple(strict.names(self._sections))
    for arg in sys.argv if self._argv is None else self._argv:
      match = re.match(rf"--?(?:no)?{FLAG}\.([^=]*)", arg)
      if match and match[1] not in names:
        raise ValueError(strict.describe_unknown(match[1], names))
    return cfg


def _editable(config: Any) -> dict[str, Any]:
  """Values for a ConfigDict; optional ones may hold any type until `freeze`."""
  values = {}
  hints = typing.get_type_hints(type(config))
  for name in (field.name for field in dataclasses.fields(config)):
    value = getattr(config, name)
    if dataclasses.is_dataclass(value):
      value = _editable(value)
    elif type(None) in typing.get_args(hints[name]):
      value = FieldReference(value, field_type=object)
    values[name] = value
  return values
