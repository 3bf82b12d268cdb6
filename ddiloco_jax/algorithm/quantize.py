"""Number formats of a tensor on the wire, one table entry each.

A format turns float32 numbers into little-endian bytes and back; hosts are
little-endian, as JAX's are. (arXiv 2604.21428, Sec. 3.4 and Table 7.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Buffer = bytes | bytearray | memoryview


class _Format(NamedTuple):
  num_bytes: Callable[[int], int]
  encode: Callable[[np.ndarray, Any], None]
  decode: Callable[[Buffer, int], np.ndarray]


def num_bytes(num_elements: int, format: str) -> int:
  """The bytes that a tensor of so many elements takes."""
  return _format(format).num_bytes(num_elements)


def encode(array: Any, format: str, out: bytearray | memoryview) -> None:
  """Writes a tensor, flattened in row-major order.

  Args:
    array: Numbers of any floating dtype; cast to float32 first.
    out: Writable, of `num_bytes(array.size, format)` bytes.
  """
  flat = np.asarray(array, np.float32).reshape(-1)
  entry = _format(format)
  assert len(out) == entry.num_bytes(flat.size), (len(out), flat.size, format)
  entry.encode(flat, out)


def decode(buffer: Buffer, format: str, num_elements: int) -> np.ndarray:
  """Reads a tensor back.

  Returns:
    float32 of shape (num_elements,), in memory of its own.
  """
  entry = _format(format)
  assert len(buffer) == entry.num_bytes(num_elements), (
    len(buffer),
    num_elements,
    format,
  )
  return entry.decode(buffer, num_elements)


def _format(format: str) -> _Format:
  if format not in _FORMATS:
    raise ValueError(
      f"Format {format!r} is unknown. Known are {', '.join(_FORMATS)}."
    )
  return _FORMATS[format]


def _encode_float32(flat: np.ndarray, out: bytearray | memoryview) -> None:
  np.frombuffer(out, np.float32)[:] = flat


def _decode_float32(buffer: Buffer, num_elements: int) -> np.ndarray:
  return np.frombuffer(buffer, np.float32, num_elements).copy()


def _encode_bfloat16(flat: np.ndarray, out: bytearray | memoryview) -> None:
  with np.errstate(over="ignore", invalid="ignore"):  # Inf and NaN travel.
    np.frombuffer(out, np.uint16).view(ml_dtypes.bfloat16)[:] = flat


def _decode_bfloat16(buffer: Buffer, num_elements: int) -> np.ndarray:
  bits = np.frombuffer(buffer, np.uint16, num_elements).astype(np.uint32)
  bits <<= 16
  return bits.view(np.float32)


_FORMATS = {
  "float32": _Format(lambda n: 4 * n, _encode_float32, _decode_float32),
  "bfloat16": _Format(lambda n: 2 * n, _encode_bfloat16, _decode_bfloat16),
}
