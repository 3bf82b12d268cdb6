"""A fragment as bytes: order, lengths, ownership."""

import struct

import numpy as np
import pytest

from ddiloco_jax.algorithm.fragments import Leaf
from ddiloco_jax.wire import codec

LEAVES = (
  Leaf("a", "float32", (2, 2), 0),
  Leaf("b/scale", "bfloat16", (), 0),
  Leaf("c", "float32", (0, 4), 0),
)
FORMATS = ("float32", "bfloat16")


def make_fragment():
  return {
    "c": np.zeros((0, 4), np.float32),
    "b/scale": np.float32(5.0),
    "a": np.array([[1, 2], [3, 4]], np.float32),
  }


def test_leaves_lie_in_the_order_of_the_layout_without_padding():
  buffer = codec.encode(make_fragment(), LEAVES, "float32")

  assert bytes(buffer) == struct.pack("<5f", 1, 2, 3, 4, 5)


@pytest.mark.parametrize("format", FORMATS)
def test_a_fragment_comes_back(format):
  fragment = make_fragment()

  buffer = codec.encode(fragment, LEAVES, format)
  back = codec.decode(bytes(buffer), LEAVES, format)

  assert len(buffer) == codec.num_bytes(LEAVES, format)
  assert list(back) == [leaf.path for leaf in LEAVES]
  for leaf in LEAVES:
    assert isinstance(back[leaf.path], np.ndarray)
    assert back[leaf.path].dtype == np.float32
    assert back[leaf.path].shape == leaf.shape
    np.testing.assert_array_equal(back[leaf.path], fragment[leaf.path])


@pytest.mark.parametrize("format", FORMATS)
def test_a_reused_receive_buffer_does_not_reach_what_was_decoded(format):
  buffer = codec.encode(make_fragment(), LEAVES, format)

  back = codec.decode(memoryview(buffer), LEAVES, format)
  buffer[:] = bytes(len(buffer))

  assert back["a"].tolist() == [[1, 2], [3, 4]]
  assert back["b/scale"] == 5


def test_num_bytes_follows_layout_and_format():
  assert codec.num_bytes(LEAVES, "float32") == 20
  assert codec.num_bytes(LEAVES, "bfloat16") == 10
  assert codec.num_bytes((), "float32") == 0


@pytest.mark.parametrize("length", [0, 19, 21])
def test_a_wrong_length_is_an_error_with_both_numbers(length):
  with pytest.raises(ValueError, match=f"of {length} bytes.* 20"):
    codec.decode(bytes(length), LEAVES, "float32")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"a": np.zeros((4,))}, r"'a' has the shape \(4,\).*\(2, 2\)"),
    ({"z": np.zeros(1)}, "'z' is not in the layout"),
  ],
)
def test_a_fragment_that_is_not_the_layouts_is_not_encoded(change, message):
  with pytest.raises(ValueError, match=message):
    codec.encode(make_fragment() | change, LEAVES, "float32")


def test_a_missing_leaf_is_named():
  fragment = make_fragment()
  del fragment["b/scale"]

  with pytest.raises(ValueError, match="'b/scale' is missing"):
    codec.encode(fragment, LEAVES, "float32")


@pytest.mark.parametrize("chunk_bytes", [1, 3, 10, 100])
def test_chunks_are_views_that_add_up(chunk_bytes):
  buffer = bytearray(range(10))

  pieces = list(codec.chunks(buffer, chunk_bytes))

  assert b"".join(pieces) == buffer
  assert all(0 < len(piece) <= chunk_bytes for piece in pieces)
  assert pieces[0].obj is buffer


def test_no_bytes_are_no_chunks():
  assert list(codec.chunks(b"", 5)) == []


def test_a_chunk_has_a_byte():
  with pytest.raises(ValueError, match="chunk_bytes is 0"):
    next(codec.chunks(b"abc", 0))
