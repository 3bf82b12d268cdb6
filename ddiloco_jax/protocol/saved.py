"""Protocol values as strict JSON, and back by their types: exact both ways."""

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any

# Numbers that strict JSON has no word for.
_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_PLAIN = frozenset({int, str, bool, type(None)})


def encode(value: Any) -> Any:
  """JSON values: a dataclass becomes an object, any tuple an array."""
  kind = type(value)
  if kind in _PLAIN:
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else str(value)
  if isinstance(value, tuple | list):
    return [encode(item) for item in value]
  if isinstance(value, dict):
    return {str(key): encode(item) for key, item in value.items()}
  if isinstance(value, enum.Enum):
    return value.value
  if dataclasses.is_dataclass(kind):
    return {name: encode(getattr(value, name)) for name in _kinds(kind)}
  return value


def decode(kind: Any, value: Any) -> Any:
  """The value of a type that `encode` made these JSON values of.

  Raises:
    ValueError: They are none of that type; the field and the value are named.
  """
  return _decoder(kind)(value)


@functools.cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
  """What decodes values of a type; made once, as types are few."""
  origin, parts = typing.get_origin(kind), typing.get_args(kind)
  if kind is Any:
    return lambda value: value
  if origin in (typing.Union, types.UnionType):
    some = _decoder(next(k for k in parts if k is not type(None)))
    return lambda value: None if value is None else some(value)
  if origin is tuple:
    return functools.partial(_decode_tuple, parts)
  if origin is dict:
    return functools.partial(_decode_dict, *parts)
  if dataclasses.is_dataclass(kind):
    return functools.partial(decode_object, kind)
  if hasattr(kind, "_fields"):
    return functools.partial(_decode_row, kind)
  return functools.partial(_decode_word, kind)


def decode_object(kind: Any, values: Any, **known: Any) -> Any:
  """An object of a class with named fields; `known` are fields as they are.

  Raises:
    ValueError: A field is missing, unknown, or of another type.
  """
  kinds, fields = _kinds(kind), dict(known)
  for name, item in _check(values, dict, "object").items():
    if name not in kinds:
      raise ValueError(f"{kind.__name__} has no field {name!r}")
    try:
      fields[name] = decode(kinds[name], item)
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from None
  try:
    return kind(**fields)
  except TypeError as error:  # It says which are missing.
    raise ValueError(f"fields are missing: {error}") from None


def _decode_row(kind: Any, value: Any) -> Any:
  items = _check(value, list | tuple, "array")
  return decode_object(kind, dict(zip(_names(kind, items), items)))


def _decode_dict(key_kind: Any, item_kind: Any, value: Any) -> dict[Any, Any]:
  items = _check(value, dict, "object").items()
  return {key_kind(key): decode(item_kind, item) for key, item in items}


def _decode_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
  items = _check(value, list | tuple, "array")
  if len(kinds) == 2 and kinds[1] is Ellipsis:
    each = _decoder(kinds[0])
    return tuple([each(item) for item in items])
  if len(items) != len(kinds):
    raise ValueError(f"{_short(value)} has not {len(kinds)} elements")
  return tuple(decode(kind, item) for kind, item in zip(kinds, items))


def _decode_word(kind: Any, value: Any) -> Any:
  if kind is float:
    if isinstance(value, str) and value in _WORDS:
      return _WORDS[value]
    # 2 stays 2 and 2.0 stays 2.0: a digest of the text tells them apart.
    known = isinstance(value, int | float) and not isinstance(value, bool)
  elif issubclass(kind, enum.Enum):
    return kind(value)
  else:
    known = type(value) is kind
  if not known:
    raise ValueError(f"{_short(value)} is no {kind.__name__}")
  return value


def _names(kind: Any, items: Any) -> tuple[str, ...]:
  if len(items) > len(kind._fields):
    raise ValueError(
      f"{_short(items)} has more than the {len(kind._fields)} fields of"
      f" {kind.__name__}"
    )
  return kind._fields


def _check(value: Any, kind: Any, word: str) -> Any:
  if not isinstance(value, kind):
    raise ValueError(f"{_short(value)} is no {word}")
  return value


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 40 else f"{text[:37]}..."


@functools.lru_cache(maxsize=64)
def _kinds(kind: Any) -> dict[str, Any]:
  return typing.get_type_hints(kind)
