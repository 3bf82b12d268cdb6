"""What messages share: versions, counts, positions, formats, outcomes.

What comes off the wire is checked as it is read: inside, a count is never
missing, negative or absurd. (arXiv 2604.21428, Sec. 3.)
"""

import re
from typing import Any

from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.check import MAX_COUNT
from ddiloco_jax.wire import listening, port
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError

LEARNER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ID_RULE = (
  "it has 1 to 64 letters, digits, '.', '_' or '-', and starts with a letter or"
  " digit"
)
# No scheme: who dials it connects to nothing but a TCP port.
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]{1,253}):(\d{1,5})")
MAX_ITEMS = 1 << 16  # Of a list: fragments, shards. The run knows how many.
MAX_TEXT = 256  # Characters of a nonce, a secret or a name.

FORMATS: dict[str, Any] = {
  "float32": pb.FORMAT_FLOAT32,
  "bfloat16": pb.FORMAT_BFLOAT16,
  "int8": pb.FORMAT_INT8,
  "int4": pb.FORMAT_INT4,
}
OUTCOMES: dict[events.Outcome, Any] = {
  outcome: pb.Outcome.Value(f"OUTCOME_{outcome.name}")
  for outcome in events.Outcome
}
_FORMAT_OF = {number: name for name, number in FORMATS.items()}
_OUTCOME_OF = {number: outcome for outcome, number in OUTCOMES.items()}


def version_to_pb(version: events.Version) -> pb.Version:
  return pb.Version(epoch=version.epoch, n=version.n)


def version_from_pb(where: str, message: Any, field: str) -> events.Version:
  if not message.HasField(field):
    raise missing(f"{where}.{field}", "a version")
  return read_version(f"{where}.{field}", getattr(message, field))


def counts_to_pb(counts: events.Counts) -> pb.Counts:
  return pb.Counts(steps=counts.steps, tokens=counts.tokens)


def counts_from_pb(where: str, message: Any, field: str) -> events.Counts:
  if not message.HasField(field):
    raise missing(f"{where}.{field}", "steps and tokens")
  return read_counts(f"{where}.{field}", getattr(message, field))


def position_to_pb(position: events.Position) -> pb.Position:
  return pb.Position(shard=position.shard, batch=position.batch)


def check_length(name: str, values: Any) -> None:
  """Refuses a list of which no run could have so many."""
  if len(values) > MAX_ITEMS:
    raise invalid(name, f"a list of {len(values)}; at most {MAX_ITEMS}")


def positions_from_pb(where: str, positions: Any) -> tuple:
  check_length(f"{where}.positions", positions)
  return tuple(
    events.Position(
      natural(f"{where}.positions: shard", position.shard),
      natural(f"{where}.positions: batch", position.batch),
    )
    for position in positions
  )


def natural(name: str, value: int) -> int:
  """A number that counts something."""
  if not 0 <= value <= MAX_COUNT:
    raise invalid(name, f"{value}; it is in 0..2^53")
  return value


def address_from_pb(name: str, value: str) -> str:
  """HOST:PORT that others can dial, or empty."""
  found = _ADDRESS.fullmatch(value)
  if value and not (found and 0 < int(found[1]) < 65536):
    raise invalid(
      name, f"{value[:MAX_TEXT]!r}; it is HOST:PORT, such as 10.0.0.1:8470"
    )
  if value and listening.is_wildcard(listening.parse_address(value)[0]):
    raise invalid(
      name,
      f"{value!r}, which is any address of its machine; others need one of"
      " them, such as 10.0.0.1:8470",
    )
  return value


def learner_from_pb(name: str, value: str) -> str:
  if not LEARNER_ID.fullmatch(value):
    raise invalid(name, f"{value[:MAX_TEXT]!r}; {ID_RULE}")
  return value


def read_version(name: str, version: pb.Version) -> events.Version:
  return events.Version(
    natural(f"{name}.epoch", version.epoch), natural(f"{name}.n", version.n)
  )


def read_counts(name: str, counts: pb.Counts) -> events.Counts:
  for field in ("steps", "tokens"):
    if not counts.HasField(field):
      raise missing(f"{name}.{field}", "a count, even if it is 0")
  return events.Counts(
    natural(f"{name}.steps", counts.steps),
    natural(f"{name}.tokens", counts.tokens),
  )


def session_from_pb(where: str, message: Any) -> port.Session:
  return port.Session(
    learner=learner_from_pb(f"{where}.learner_id", message.learner_id),
    incarnation=natural(f"{where}.incarnation", message.incarnation),
    secret=message.session_secret[:MAX_TEXT],
  )


def format_from_pb(number: int) -> str:
  if number not in _FORMAT_OF:
    raise invalid(
      "format", f"{number}; it is one of {', '.join(FORMATS)}, as GetRun says"
    )
  return _FORMAT_OF[number]


def outcome_from_pb(name: str, number: int) -> events.Outcome:
  if number not in _OUTCOME_OF:
    raise invalid(name, f"{number}; it is one of {', '.join(OUTCOMES)}")
  return _OUTCOME_OF[number]


def text_from_pb(name: str, value: str) -> str:
  if not (1 <= len(value) <= MAX_TEXT and value.isprintable()):
    raise invalid(
      name,
      f"{len(value)} characters; it has between 1 and {MAX_TEXT}, all of them"
      " printable",
    )
  return value


def said_from_pb(value: str) -> str:
  """What somebody says in words: cut to MAX_TEXT, and no control characters,
  which could forge lines of a log or of a screen."""
  return "".join(c if c.isprintable() else "?" for c in value[:MAX_TEXT])


def invalid(name: str, text: str) -> ServiceError:
  return ServiceError("INVALID_ARGUMENT", f"{name} is {text}.")


def missing(name: str, what: str) -> ServiceError:
  return ServiceError(
    "INVALID_ARGUMENT", f"{name} is missing: it must be set, to {what}."
  )
