"""Protocol values as strict JSON, and back by their types: exact both ways."""

import dataclasses
import enum
import functools
import math
import types
import typing
from typing import Any

# Numbers that strict JSON has no word for.
_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def encode(value: Any) -> Any:
  """JSON values: a dataclass becomes an object, any tuple an array."""
  if dataclasses.is_dataclass(value):
    return {
      f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)
    }
  if isinstance(value, enum.Enum):
    return value.value
  if isinstance(value, dict):
    return {str(key): encode(item) for key, item in value.items()}
  if isinstance(value, tuple | list):
    return [encode(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value


def decode(kind: Any, value: Any) -> Any:
  """The value of a type that `encode` made these JSON values of.

  Raises:
    ValueError: They are none of that type; the field and the value are named.
  """
  origin = typing.get_origin(kind)
  if kind is Any:
    return value
  if origin in (typing.Union, types.UnionType):
    kinds = [k for k in typing.get_args(kind) if k is not type(None)]
    return None if value is None else decode(kinds[0], value)
  if origin is tuple:
    return _decode_tuple(typing.get_args(kind), value)
  if origin is dict:
    key_kind, item_kind = typing.get_args(kind)
    items = _check(value, dict, "object").items()
    return {key_kind(key): decode(item_kind, item) for key, item in items}
  if dataclasses.is_dataclass(kind):
    return decode_object(kind, value)
  if hasattr(kind, "_fields"):
    items = _check(value, list | tuple, "array")
    return decode_object(kind, dict(zip(_names(kind, items), items)))
  return _decode_word(kind, value)


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


def _decode_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
  items = _check(value, list | tuple, "array")
  if len(kinds) == 2 and kinds[1] is Ellipsis:
    kinds = (kinds[0],) * len(items)
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
