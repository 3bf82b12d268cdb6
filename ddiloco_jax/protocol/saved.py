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
  """The value of a type that `encode` made these JSON values of."""
  origin = typing.get_origin(kind)
  if origin in (typing.Union, types.UnionType):
    if value is None:
      return None
    kinds = [k for k in typing.get_args(kind) if k is not type(None)]
    return decode(kinds[0], value)
  if origin is tuple:
    kinds = typing.get_args(kind)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
      return tuple(decode(kinds[0], item) for item in value)
    return tuple(decode(k, item) for k, item in zip(kinds, value))
  if origin is dict:
    key_kind, item_kind = typing.get_args(kind)
    return {key_kind(k): decode(item_kind, v) for k, v in value.items()}
  if dataclasses.is_dataclass(kind):
    kinds = _kinds(kind)
    return typing.cast(Any, kind)(
      **{name: decode(kinds[name], item) for name, item in value.items()}
    )
  if isinstance(kind, type) and hasattr(kind, "_fields"):
    kinds = _kinds(kind)
    return kind(*(decode(k, v) for k, v in zip(kinds.values(), value)))
  if kind is float:
    # 2 stays 2 and 2.0 stays 2.0: a digest of the text tells them apart.
    return _WORDS[value] if isinstance(value, str) else value
  return kind(value) if isinstance(kind, type) else value


@functools.lru_cache(maxsize=64)
def _kinds(kind: Any) -> dict[str, Any]:
  return typing.get_type_hints(kind)
