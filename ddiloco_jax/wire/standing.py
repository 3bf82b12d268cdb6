"""How a run stands, as a message: field by field, by name.

(arXiv 2604.21428, Sec. 3.)
"""

from typing import Any

from google.protobuf.message import Message

from ddiloco_jax.protocol.status import Status
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb

_NAMES = {"learner_id": "learner"}  # Where the two differ.


def status_to_pb(status: Status) -> pb.Status:
  message = pb.Status()
  _fill(message, status)
  return message


def _fill(message: Message, value: Any) -> None:
  for field in message.DESCRIPTOR.fields:
    given = getattr(value, _NAMES.get(field.name, field.name))
    target = getattr(message, field.name)
    if field.message_type and field.message_type.GetOptions().map_entry:
      target.update(dict(given))
    elif field.message_type and field.is_repeated:
      for item in given:
        _fill(target.add(), item)
    elif field.message_type:
      _fill(target, given)
      target.SetInParent()
    elif field.is_repeated:
      target.extend(given)
    else:
      setattr(message, field.name, given)
