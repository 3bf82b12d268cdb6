"""Formats: sizes, rounding, and what is kept of the extremes."""

import struct

import numpy as np
import pytest

from ddiloco_jax.algorithm import quantize


def round_trip(array, format):
  out = bytearray(quantize.num_bytes(array.size, format))
  quantize.encode(array, format, out)
  return quantize.decode(out, format, array.size)


def round_to_bfloat16(x):
  """Nearest, ties to even, by the bits; finite numbers only."""
  (bits,) = struct.unpack("<I", struct.pack("<f", x))
  low, high = bits & 0xFFFF, bits >> 16
  if low > 0x8000 or (low == 0x8000 and high & 1):
    high += 1
  return struct.unpack("<f", struct.pack("<I", high << 16))[0]


def test_sizes():
  assert quantize.num_bytes(7, "float32") == 28
  assert quantize.num_bytes(7, "bfloat16") == 14


def test_float32_is_exact_and_little_endian():
  array = np.array([1.5, -0.0, np.inf, 1e-45], np.float32)
  out = bytearray(16)

  quantize.encode(array, "float32", out)

  assert bytes(out) == struct.pack("<4f", *array.tolist())
  back = quantize.decode(out, "float32", 4)
  assert back.tobytes() == array.tobytes()


def test_bfloat16_rounds_to_nearest_even():
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 0x7F7F0000, 2000, np.uint32)
  ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
  array = np.concatenate([bits, ties]).view(np.float32)
  array[::2] *= -1

  back = round_trip(array, "bfloat16")

  assert back.tolist() == [round_to_bfloat16(x) for x in array.tolist()]


def test_bfloat16_keeps_infinities_and_nan_and_overflows_to_infinity():
  array = np.array([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38], np.float32)

  back = round_trip(array, "bfloat16")

  expected = [np.inf, -np.inf, np.nan, np.inf, -np.inf]
  np.testing.assert_array_equal(back, np.array(expected, np.float32))


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_what_is_decoded_has_memory_of_its_own(format):
  out = bytearray(quantize.num_bytes(3, format))
  quantize.encode(np.ones(3, np.float32), format, out)

  back = quantize.decode(out, format, 3)
  out[:] = bytes(len(out))

  assert back.tolist() == [1.0, 1.0, 1.0]
  assert back.flags.writeable


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_scalars_empty_and_strided_arrays_pass(format):
  assert round_trip(np.array(2.0), format).tolist() == [2.0]
  assert round_trip(np.zeros((0, 3)), format).tolist() == []
  turned = np.arange(6.0).reshape(2, 3).T
  assert round_trip(turned, format).tolist() == [0, 3, 1, 4, 2, 5]


def test_an_unknown_format_is_an_error_that_names_the_known():
  with pytest.raises(ValueError, match=r"'float8'.*float32, bfloat16"):
    quantize.num_bytes(1, "float8")
