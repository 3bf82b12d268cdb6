"""One fragment's way through a stream: header, chunks, trailer with CRC-32.

Chunks are framed and parsed by hand, byte for byte as protobuf does it: its own
serializer copies the data once more and costs a third of the speed. All bulk
messages have these three parts. (arXiv 2604.21428, Sec. 3.)
"""

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
from google.protobuf import message as protobuf

from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError

Chunk = bytes | memoryview
Message = pb.PushChunk | pb.FetchChunk | pb.StateChunk
Part = Message | Chunk  # Header and trailer as messages, data as it is.

SLOWEST_BYTES_PER_S = 1e6  # A peer's state that moves slower is cut off.
_DATA_TAG = (pb.PushChunk.DATA_FIELD_NUMBER << 3) | 2
assert (
  pb.PushChunk.DATA_FIELD_NUMBER
  == pb.FetchChunk.DATA_FIELD_NUMBER
  == pb.StateChunk.DATA_FIELD_NUMBER
)


class Pace:
  """Holds a flow of bytes to a rate; a rate of 0 holds nothing.

  Args:
    bytes_per_s: Shared by all transfers that are given this pace.
  """

  def __init__(
    self,
    bytes_per_s: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
  ):
    self._bytes_per_s = bytes_per_s
    self._now = now
    self._sleep = sleep
    self._lock = threading.Lock()
    self._free_at = 0.0

  def wait(self, num_bytes: int) -> None:
    """Blocks until the bytes may go."""
    if not self._bytes_per_s:
      return
    with self._lock:
      now = self._now()
      start = max(now, self._free_at)
      self._free_at = start + num_bytes / self._bytes_per_s
    if start > now:
      self._sleep(start - now)


def send(
  part: type[Message],
  header: Any,
  chunks: Iterable[Chunk],
  crc32: int | None = None,
  pace: Pace | None = None,
) -> Iterator[Part]:
  """The parts of one transfer.

  Args:
    part: PushChunk, FetchChunk or StateChunk.
    header: Its header message.
    chunks: The data, each at most chunk_bytes.
    crc32: Of all data, if it is known already.
  """
  yield part(header=header)
  running = 0
  for chunk in chunks:
    if pace:
      pace.wait(len(chunk))
    if crc32 is None:
      running = zlib.crc32(chunk, running)
    yield chunk
  yield part(trailer=pb.Trailer(crc32=running if crc32 is None else crc32))


def receive_header(parts: Iterator[Part]) -> Any:
  """The header that opens a transfer.

  Raises:
    ServiceError: INVALID_ARGUMENT for anything else.
  """
  first = next(parts, None)
  if isinstance(first, Message) and first.HasField("header"):
    return first.header
  raise ServiceError(
    "INVALID_ARGUMENT",
    f"a transfer opened with {_describe(first)}; it must open with its header,"
    " then data, then the trailer.",
  )


def receive_chunks(parts: Iterator[Part], num_bytes: int) -> Iterator[Chunk]:
  """The data that follows a header; the end of it has passed its checksum.

  Raises:
    ServiceError: INVALID_ARGUMENT for a part out of place, too many bytes, or
      a length or checksum that is not the announced one; UNAVAILABLE where
      the stream broke.
  """
  size, running = 0, 0
  try:
    for part in parts:
      if isinstance(part, Message):
        _check_trailer(part, size, num_bytes, running)
        return
      size += len(part)
      if size > num_bytes:
        raise ServiceError(
          "INVALID_ARGUMENT",
          f"{size} bytes arrived of a transfer whose header announced"
          f" {num_bytes}: send exactly what num_bytes says.",
        )
      running = zlib.crc32(part, running)
      yield part
  except grpc.RpcError as error:
    if isinstance(error, grpc.Call):
      raise  # A client's: it knows the reason.
    raise ServiceError(
      "UNAVAILABLE",
      f"the transfer broke off after {size} of {num_bytes} bytes; nothing of"
      " it is kept. Send it again.",
    ) from error
  raise ServiceError(
    "INVALID_ARGUMENT",
    f"the transfer ended after {size} of {num_bytes} bytes without its"
    " trailer; nothing of it is kept. Send the trailer after the data.",
  )


def collect(parts: Iterator[Part], num_bytes: int, pace: Pace) -> bytearray:
  """All data of a transfer, in one buffer that the caller owns.

  Raises:
    ServiceError: as `receive_chunks`.
  """
  buffer = bytearray(num_bytes)
  size = 0
  for chunk in receive_chunks(parts, num_bytes):
    buffer[size : size + len(chunk)] = chunk
    size += len(chunk)
    pace.wait(len(chunk))
  return buffer


def serialize(part: Part) -> bytes:
  """A part as the bytes of its message."""
  if isinstance(part, Message):
    return part.SerializeToString()
  prefix = bytearray((_DATA_TAG,))
  size = len(part)
  while size > 127:
    prefix.append(size & 127 | 128)
    size >>= 7
  prefix.append(size)
  return b"".join((prefix, part))


def parser(part: type[Message]) -> Callable[[bytes], Part]:
  """What reads the messages of one kind; data comes as a view of its message.

  Bytes that are no message come as an empty part, which has no place anywhere.
  """

  def parse(message: bytes) -> Part:
    if message and message[0] == _DATA_TAG:
      size, shift, at = 0, 0, 1
      while at < min(len(message), 6):
        size |= (message[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if message[at - 1] < 128:
          break
      if at + size == len(message):
        return memoryview(message)[at:]
    try:
      parsed = part.FromString(message)
    except protobuf.DecodeError:
      return part()
    return parsed.data if parsed.WhichOneof("part") == "data" else parsed

  return parse


def _check_trailer(
  part: Message, size: int, num_bytes: int, running: int
) -> None:
  if not part.HasField("trailer"):
    raise ServiceError(
      "INVALID_ARGUMENT",
      f"{_describe(part)} within a transfer; only data and then the trailer"
      " may follow its header.",
    )
  if size != num_bytes:
    raise ServiceError(
      "INVALID_ARGUMENT",
      f"{size} bytes arrived of a transfer whose header announced"
      f" {num_bytes}: send exactly what num_bytes says.",
    )
  crc32 = part.trailer.crc32
  if crc32 != running:
    raise ServiceError(
      "INVALID_ARGUMENT",
      f"checksum {crc32:#010x} of the trailer, {running:#010x} of the"
      f" {size} bytes that arrived: CRC-32 (zlib) of all data bytes. Send the"
      " fragment again.",
    )


def _describe(part: Part | None) -> str:
  if part is None:
    return "nothing"
  if not isinstance(part, Message):
    return f"{len(part)} bytes of data"
  return f"a {part.WhichOneof('part') or 'part without content'}"
