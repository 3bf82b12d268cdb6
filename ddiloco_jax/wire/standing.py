"""How a run stands, as a message: field by field, by name.

(arXiv 2604.21428, Sec. 3.)
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from ddiloco_jax.wire.pb import synchronizer_pb2 as pb


def status_to_pb(status: Any) -> pb.Status:
  """A protocol.status.Status as a message."""
  message = pb.Status()
  _fill(message, status)
  return message


def _fill(message: Message, value: Any) -> None:
  for field in message.DESCRIPTOR.fields:
    given = getattr(value, field.name)
    target = getattr(message, field.name)
    if field.message_type is None and not field.is_repeated:
      setattr(message, field.name, given)
    elif isinstance(given, Mapping):
      target.update(given)
    elif field.message_type is None:
      target.extend(given)
    elif field.is_repeated:
      for item in given:
        _fill(target.add(), item)
    else:
      _fill(target, given)
      target.SetInParent()
