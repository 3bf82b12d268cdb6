"""The lines of a tape: strict JSON objects, read as strictly.

Whatever a damaged line is, it ends in a ValueError that says what is wrong.
"""

import dataclasses
import json
from typing import Any

from ddiloco_jax.protocol import events, saved
from ddiloco_jax.protocol.rules import Rules


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
  """A header line; see `tape.header`."""

  tape: int
  run_id: str
  epoch: int
  libraries: dict[str, str]
  rules: Rules
  start: dict[str, Any]
  machine: str = ""
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
  """The line of one event; see `tape.TapeWriter.append`."""

  event: dict[str, Any]
  digest: str
  merges: tuple[Any, ...] = ()
  state: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class End:
  """The last line of an epoch; see `tape.TapeWriter.close`."""

  end: int
  state: str


_EVENTS = {
  name: kind
  for name, kind in vars(events).items()
  if isinstance(kind, type) and issubclass(kind, events.Event)
}


def decode_event(values: dict[str, Any]) -> events.Event:
  """The event that `events.to_dict` made these values of.

  Raises:
    ValueError: There is no such event, or its fields are others.
  """
  fields = dict(values)
  name = fields.pop("type", None)
  kind = _EVENTS.get(name) if isinstance(name, str) else None
  if kind is None:
    raise ValueError(f"there is no event {name!r}")
  try:
    return saved.decode(kind, fields)
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from None


def parse(text: bytes) -> dict[str, Any]:
  """The object of one line.

  Raises:
    ValueError: It is no strict JSON object.
  """
  try:
    values = json.loads(text.decode("utf-8"), parse_constant=_refuse)
  except json.JSONDecodeError as error:
    raise ValueError(f"no JSON: {error.msg} at column {error.colno}") from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f"no JSON: {error}") from error
  if not isinstance(values, dict):
    raise ValueError("no JSON object")
  return values


def _refuse(word: str) -> None:
  raise ValueError(f"{word} is no JSON value")


def dump(values: Any) -> str:
  """Strict JSON, without the end of the line."""
  try:
    return json.dumps(values, separators=(",", ":"), allow_nan=False)
  except ValueError:  # A norm that is not finite, which JSON has no word for.
    return json.dumps(
      saved.encode(values), separators=(",", ":"), allow_nan=False
    )
