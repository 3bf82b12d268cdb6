"""Records of a journal: a length and a checksum, a JSON head, raw arrays.

What a crash leaves of a record at the end of a file is cut short; any other
that fails its checksum is damage, and what follows it is read on. Layout, little endian: magic (4
bytes), length of all that follows the frame (u64), its CRC-32 (u32); then the
length of the compressed head (u32), the head, and the arrays one after the
other as the head describes them.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

_FRAME = struct.Struct("<4sQI")
_HEAD = struct.Struct("<I")
_MAGIC = b"DDJ1"


class Record(NamedTuple):
  """A whole record.

  Attributes:
    head: JSON values.
    arrays: In the order in which they were given.
    end: The offset in its file at which it ends.
  """

  head: dict[str, Any]
  arrays: list[np.ndarray]
  end: int


class Fault(NamedTuple):
  """Bytes that are no whole record.

  Attributes:
    at: Offset of the first.
    is_torn: They are the last of their file, and cut short: a crash while a
      record was appended leaves as much.
  """

  at: int
  is_torn: bool


def encode(
  head: dict[str, Any], arrays: Sequence[np.ndarray]
) -> list[memoryview]:
  """The bytes of a record, as buffers; contiguous arrays are not copied."""
  # np.ascontiguousarray would give an array of shape () another one.
  arrays = [np.asarray(x, order="C") for x in arrays]
  described = [[x.dtype.name, [*np.shape(x)]] for x in arrays]
  text = json.dumps({**head, "arrays": described}, allow_nan=False)
  packed = zlib.compress(text.encode(), 1)
  body = [memoryview(_HEAD.pack(len(packed)) + packed)]
  body += [x.reshape(-1).view(np.uint8).data for x in arrays if x.size]
  checksum = 0
  for part in body:
    checksum = zlib.crc32(part, checksum)
  length = sum(len(part) for part in body)
  return [memoryview(_FRAME.pack(_MAGIC, length, checksum)), *body]


def read(file: BinaryIO, limit: int | None = None) -> Iterator[Record | Fault]:
  """The whole records of a file, and what lies between them.

  Args:
    file: At the start of a record.
    limit: Offset at which the file is taken to end, and to which it was synced
      once; None for its own end.
  """
  size = file.seek(0, 2)
  end = size if limit is None else min(limit, size)
  at = file.seek(0)
  while at < end:
    frame = file.read(_FRAME.size)
    magic, length, checksum = _FRAME.unpack(frame.ljust(_FRAME.size, b"\0"))
    stop = at + _FRAME.size + length
    if len(frame) < _FRAME.size or stop > end or magic != _MAGIC:
      is_cut = _MAGIC.startswith(frame[:4]) or not any(frame)
      yield Fault(at, is_torn=limit is None and is_cut)
      return  # Where the next one begins, nobody knows.
    body = bytearray(length)
    file.readinto(body)  # type: ignore[attr-defined]
    if length < _HEAD.size or zlib.crc32(body) != checksum:
      yield Fault(at, is_torn=False)
    else:
      yield Record(*_decode(body), stop)
    at = stop
  if limit is not None and at < limit:
    yield Fault(at, is_torn=False)


def _decode(body: bytearray) -> tuple[dict[str, Any], list[np.ndarray]]:
  (packed,) = _HEAD.unpack_from(body)
  at = _HEAD.size + packed
  head = json.loads(zlib.decompress(memoryview(body)[_HEAD.size : at]))
  arrays = []
  for name, shape in head.pop("arrays"):
    dtype = np.dtype(name)
    count = math.prod(shape)
    array = np.frombuffer(body, dtype, count, at) if count else np.zeros(0)
    arrays.append(array.astype(dtype, copy=False).reshape(shape))
    at += count * dtype.itemsize
  return head, arrays
