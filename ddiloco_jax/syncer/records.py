"""Records of a journal: a length and a checksum, a JSON head, raw arrays.

A record is whole or it is not there: whatever a crash leaves of one at the end
of a file fails its length or its checksum. Layout, little endian: magic (4
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


def encode(
  head: dict[str, Any], arrays: Sequence[np.ndarray]
) -> list[memoryview]:
  """The bytes of a record, as buffers; those of the arrays are not copied."""
  arrays = [np.ascontiguousarray(x) for x in arrays]
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


def read(file: BinaryIO, limit: int | None = None) -> Iterator[Record]:
  """The whole records of a file, up to the first that is not.

  Args:
    file: At the start of a record.
    limit: Offset at which the file is taken to end; None for its own end.
  """
  size = file.seek(0, 2)
  end = size if limit is None else min(limit, size)
  at = file.seek(0)
  while at + _FRAME.size <= end:
    magic, length, checksum = _FRAME.unpack(file.read(_FRAME.size))
    at += _FRAME.size + length
    if magic != _MAGIC or at > end or length < _HEAD.size:
      return
    body = bytearray(length)
    file.readinto(body)  # type: ignore[attr-defined]
    if zlib.crc32(body) != checksum:
      return
    head, arrays = _decode(body)
    yield Record(head, arrays, at)


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
