"""A dataclass of dataclasses from plain values, strictly.

Names must be there and types must fit; who misspells a name is told the nearest.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def build(cls: Any, values: Any) -> Any:
  """A dataclass whose fields are dataclasses, its sections.

  Args:
    cls: Which.
    values: Sections by name; what is left out has its default. An int is taken
      for a float and a list for a tuple; nothing else is converted.

  Raises:
    ValueError: an unknown name, a wrong type, or what a section refuses.
  """
  return _build(cls, values, "", tuple(names(cls)))


def names(cls: Any) -> Iterator[str]:
  """The dotted names of all settings, without the sections themselves."""
  hints = typing.get_type_hints(cls)
  for section in _fields(cls):
    for key in _fields(hints[section]):
      yield f"{section}.{key}"


def describe_unknown(name: str, names: Sequence[str]) -> str:
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
    + nearest(name, same_key or here or names, "The nearest is")
    + (f" Section {section} has " if here else " Sections are ")
    + ", ".join([n.rpartition(".")[2] for n in here] or sections)
    + "."
  )


def nearest(name: str, names: Sequence[str], words: str) -> str:
  """The name most like another, in a sentence; empty if there is none."""
  match = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
  return f" {words} {match[0]!r}." if match else ""


def _build(cls: Any, values: Any, section: str, known: tuple[str, ...]) -> Any:
  if not isinstance(values, Mapping):
    raise ValueError(
      f"{section or 'settings'} is {values!r}: it must be a section, with "
      f"{', '.join(_fields(cls))}."
    )
  hints = typing.get_type_hints(cls)
  prefix = f"{section}." if section else ""
  for key in values:
    if key not in hints:
      raise ValueError(describe_unknown(f"{prefix}{key}", known))
  return cls(
    **{
      key: _convert(value, hints[key], f"{prefix}{key}", known)
      for key, value in values.items()
    }
  )


def _convert(
  value: Any, kind: Any, name: str, known: tuple[str, ...], also: str = ""
) -> Any:
  """The value as the type of its field, or a ValueError."""
  arguments = typing.get_args(kind)
  if dataclasses.is_dataclass(kind):
    return _build(kind, value, name, known)
  if (
    isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
  ):
    if value is None:
      return None
    (inner,) = (k for k in arguments if k is not type(None))
    return _convert(value, inner, name, known, " or None")
  if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
    (item, _) = arguments  # Only tuple[X, ...] occurs.
    return tuple(
      _convert(v, item, f"{name}[{i}]", known) for i, v in enumerate(value)
    )
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


def _fields(cls: type) -> list[str]:
  return [field.name for field in dataclasses.fields(cls)]
