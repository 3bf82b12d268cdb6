"""Random messages of the service: plausible, extreme, or broken bytes."""

import random
from typing import Any

from google.protobuf import message_factory

_INTS = (0, 1, 2, 3, -1, 7, 127, 255, 2**31 - 1, -(2**31))
_LONGS = (*_INTS, 2**32, 2**53, 2**63 - 1, -(2**63))
_DOUBLES = (0.0, 1.0, -1.0, 0.5, 1e-300, 1e308, float("inf"), float("nan"))
_STRINGS = (
  "",
  "0",
  "mallory",
  "healthy",
  "a" * 300,
  "é" * 9,
  "\0",
  "../x",
  " ",
)


def message(
  rng: random.Random,
  kind: Any,
  known: dict[str, Any],
  wild: float | None = None,
) -> Any:
  """A message of a kind.

  Args:
    known: Field name -> a value that the service would take.
    wild: How often a field is left out, or has any value; drawn if not given.
  """
  if wild is None:
    wild = rng.choice((0.0, 0.05, 0.3, 0.8))
  made = kind()
  for oneof in kind.DESCRIPTOR.oneofs:
    _fill(rng, made, rng.choice(oneof.fields), known, wild)
  for field in kind.DESCRIPTOR.fields:
    if field.containing_oneof is None and rng.random() >= wild / 2:
      _fill(rng, made, field, known, wild)
  return made


def broken(rng: random.Random, data: bytes) -> bytes:
  """Some bytes of data changed, cut off, put in, or all of them replaced."""
  bad = bytearray(data)
  for _ in range(rng.randint(1, 4)):
    at = rng.randint(0, len(bad))
    match rng.randrange(5):
      case 0 if bad:
        bad[at % len(bad)] = rng.randrange(256)
      case 1:
        del bad[at:]
      case 2:
        bad[at:at] = rng.randbytes(rng.randint(1, 20))
      case 3:
        bad[at:at] = b"\xff" * 11  # A varint without an end.
      case 4:
        bad = bytearray(rng.randbytes(rng.randint(0, 200)))
  return bytes(bad)


def _fill(
  rng: random.Random, made: Any, field: Any, known: dict[str, Any], wild: float
) -> None:
  is_wild = rng.random() < wild
  if field.is_repeated:
    if field.message_type and field.message_type.GetOptions().map_entry:
      getattr(made, field.name)[rng.choice(_STRINGS)] = rng.choice(_DOUBLES)
      return
    num = known.get(field.name, 0)
    for _ in range(rng.choice((0, 1, 2, 3, 500)) if is_wild else num):
      if field.message_type:
        kind = message_factory.GetMessageClass(field.message_type)
        getattr(made, field.name).append(message(rng, kind, known, wild))
      else:
        getattr(made, field.name).append(_scalar(rng, field))
  elif field.message_type:
    kind = message_factory.GetMessageClass(field.message_type)
    getattr(made, field.name).CopyFrom(message(rng, kind, known, wild))
  elif is_wild:
    setattr(made, field.name, _scalar(rng, field))
  elif field.name in known:
    setattr(made, field.name, known[field.name])


def _scalar(rng: random.Random, field: Any) -> Any:
  match field.type:
    case field.TYPE_STRING:
      return rng.choice(_STRINGS)
    case field.TYPE_BYTES:
      return rng.randbytes(rng.choice((0, 1, 16, 40, 5000)))
    case field.TYPE_BOOL:
      return rng.random() < 0.5
    case field.TYPE_DOUBLE | field.TYPE_FLOAT:
      return rng.choice(_DOUBLES)
    case field.TYPE_INT64:
      return rng.choice(_LONGS)
    case field.TYPE_FIXED32 | field.TYPE_UINT32:
      return rng.randrange(2**32)
    case field.TYPE_ENUM:
      return rng.choice((0, 1, 2, 3, 4, 99))
  return rng.choice(_INTS)
