"""Replies on their way: one buffer per (learner, fragment), whole or not at all.

A reply is received into its own buffer, decoded when its length and checksum
have passed, and kept until the machine says what becomes of it. (arXiv
2604.21428, Sec. 3.)
"""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ddiloco_jax.protocol import events
from ddiloco_jax.wire.status import ServiceError

_PROGRESS_S = 1.0  # At most one progress event a second per reply.


class Reply(NamedTuple):
  """A reply's tensors.

  Attributes:
    delta: Path -> float32 array.
    format: That it was received in.
    data: As it was received; empty unless payloads are recorded.
  """

  delta: dict[str, np.ndarray]
  format: str
  data: bytes | bytearray


class Inbox:
  """Holds the tensors of open rounds. Not locked: dict operations are atomic,
  and a key has one owner at a time."""

  def __init__(self):
    self._replies: dict[events.ReplyKey, Reply] = {}
    self._uploads: dict[tuple[str, int], object] = {}
    self.num_bytes = 0  # Received so far, for the status.

  def receive(
    self,
    key: events.ReplyKey,
    num_bytes: int,
    chunks: Iterable[bytes | memoryview],
    progress: Callable[[int], object],
  ) -> bytearray:
    """Collects one upload; a retry replaces one that hangs.

    Args:
      num_bytes: What the layout and the format imply.
      progress: Told the bytes so far, now and then.

    Raises:
      ServiceError: INVALID_ARGUMENT for another length, ABORTED if replaced;
        what `chunks` raises.
    """
    slot, mine = (key.learner, key.fragment), object()
    self._uploads[slot] = mine
    buffer = bytearray(num_bytes)
    size, said = 0, time.monotonic()
    for chunk in chunks:
      if self._uploads.get(slot) is not mine:
        raise ServiceError(
          "ABORTED",
          f"the upload of {key} was replaced by a newer one of the same"
          " learner and fragment.",
        )
      if size + len(chunk) > num_bytes:
        raise _length_error(key, "more than", num_bytes)
      buffer[size : size + len(chunk)] = chunk
      size += len(chunk)
      if time.monotonic() - said > _PROGRESS_S:
        said = time.monotonic()
        progress(size)
    if size != num_bytes:
      raise _length_error(key, f"{size} of", num_bytes)
    self.num_bytes += size
    return buffer

  def keep(self, key: events.ReplyKey, reply: Reply) -> bool:
    """Keeps a reply's tensors; False if this reply is kept already."""
    return self._replies.setdefault(key, reply) is reply

  def take(self, key: events.ReplyKey) -> Reply:
    """Hands a reply over to the merge."""
    return self._replies.pop(key)

  def free(self, key: events.ReplyKey) -> None:
    """Forgets a reply, if it is kept."""
    self._replies.pop(key, None)


def _length_error(
  key: events.ReplyKey, got: str, num_bytes: int
) -> ServiceError:
  return ServiceError(
    "INVALID_ARGUMENT",
    f"reply {key}: {got} the {num_bytes} bytes that its header announced"
    " arrived. Send the fragment whole, then the trailer.",
  )
