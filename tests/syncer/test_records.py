"""A record of the journal gives back the very arrays that it was given."""

import io

import numpy as np
import pytest

from ddiloco_jax.syncer import records

GRID = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
  "array",
  [
    np.array(7, np.int32),
    np.array(-0.5, np.float32),
    np.float32(2.5),
    np.zeros(0, np.float32),
    np.zeros((3, 0, 2), np.int32),
    GRID,
    np.asfortranarray(GRID),
    GRID[:, ::2],
    GRID.T[::-1],
  ],
  ids=lambda x: f"{x.dtype}{x.shape}{x.strides}",
)
def test_arrays_come_back_as_they_were(array):
  given = [array, np.arange(3, dtype=np.float32), array]

  data = b"".join(records.encode({"number": 1}, given))
  (found,) = records.read(io.BytesIO(data))

  assert isinstance(found, records.Record)
  assert (found.head, found.end) == ({"number": 1}, len(data))
  for one, other in zip(found.arrays, given, strict=True):
    assert isinstance(one, np.ndarray)
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    np.testing.assert_array_equal(one, other)
