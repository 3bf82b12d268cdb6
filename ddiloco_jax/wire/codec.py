"""A fragment as bytes, and back.

The leaves in the order of the layout, each in row-major order, without
padding; the layout says all about shapes, so that bytes carry no structure.
(arXiv 2604.21428, Sec. 3.4.)
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ddiloco_jax.algorithm import quantize
from ddiloco_jax.algorithm.fragments import Fragment, Leaf


def num_bytes(leaves: Sequence[Leaf], format: str) -> int:
  """The exact length of a fragment in a format."""
  return sum(quantize.num_bytes(leaf.num_params, format) for leaf in leaves)


def encode(
  fragment: Fragment, leaves: Sequence[Leaf], format: str
) -> bytearray:
  """Writes a fragment into a new buffer.

  Args:
    fragment: Path -> array of the leaf's shape, any floating dtype.

  Raises:
    ValueError: paths or a shape that are not those of the leaves.
  """
  if fragment.keys() != {leaf.path for leaf in leaves}:
    odd = sorted(fragment.keys() ^ {leaf.path for leaf in leaves})
    raise ValueError(
      f"The fragment has not the leaves of its layout: {odd[0]!r} is"
      f" {'not in the layout' if odd[0] in fragment else 'missing'}."
    )
  buffer = bytearray(num_bytes(leaves, format))
  view = memoryview(buffer)
  at = 0
  for leaf in leaves:
    array = fragment[leaf.path]
    if np.shape(array) != leaf.shape:
      raise ValueError(
        f"{leaf.path!r} has the shape {np.shape(array)}; the layout says"
        f" {leaf.shape}."
      )
    end = at + quantize.num_bytes(leaf.num_params, format)
    quantize.encode(array, format, view[at:end])
    at = end
  return buffer


def decode(
  buffer: bytes | bytearray | memoryview, leaves: Sequence[Leaf], format: str
) -> dict[str, np.ndarray]:
  """Reads a fragment.

  Returns:
    Path -> float32 array in memory of its own: the buffer may be reused.

  Raises:
    ValueError: a buffer whose length is not what the layout implies.
  """
  view = memoryview(buffer)
  if len(view) != num_bytes(leaves, format):
    raise ValueError(
      f"A fragment of {len(view)} bytes; its layout in {format} takes"
      f" {num_bytes(leaves, format)}."
    )
  fragment = {}
  at = 0
  for leaf in leaves:
    end = at + quantize.num_bytes(leaf.num_params, format)
    flat = quantize.decode(view[at:end], format, leaf.num_params)
    fragment[leaf.path] = flat.reshape(leaf.shape)
    at = end
  return fragment


def chunks(
  buffer: bytes | bytearray | memoryview, chunk_bytes: int
) -> Iterator[memoryview]:
  """Cuts a buffer, without copying, into pieces of at most chunk_bytes."""
  if chunk_bytes < 1:
    raise ValueError(f"chunk_bytes is {chunk_bytes}; a chunk has a byte.")
  view = memoryview(buffer)
  for start in range(0, len(view), chunk_bytes):
    yield view[start : start + chunk_bytes]
