"""Layouts: every leaf once, deterministic, comparable."""

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ddiloco_jax.algorithm import fragments
from ddiloco_jax.algorithm.fragments import Layout, Leaf

KINDS = ("balanced", "tensor", "layer_strided", "layer_sequential")


def decoder_shapes(num_layers=12, dim=4, vocab=50):
  shapes = {"embedding": (vocab, dim), "final_norm/scale": (dim,)}
  shapes["head"] = (dim, vocab)
  for i in range(num_layers):
    shapes[f"layers_{i}/attention/query"] = (dim, dim)
    shapes[f"layers_{i}/mlp/Dense_0/kernel"] = (dim, 4 * dim)
    shapes[f"layers_{i}/mlp/Dense_1/kernel"] = (4 * dim, dim)
  return {path: (shape, "float32") for path, shape in shapes.items()}


def fragments_of(layout, *, containing):
  return [x.fragment for x in layout.leaves if containing in x.path]


def best_fullest_bin(sizes, num_bins):
  assignments = itertools.product(range(num_bins), repeat=len(sizes))
  return min(
    max(sum(s for s, b in zip(sizes, bins) if b == p) for p in range(num_bins))
    for bins in assignments
  )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_fragments", [1, 2, 5, 12])
def test_every_leaf_is_in_exactly_one_of_p_fragments(kind, num_fragments):
  shapes = decoder_shapes()

  layout = fragments.make_layout(shapes, kind, num_fragments)

  parts = [layout.fragment(p) for p in range(num_fragments)]
  assert layout.num_fragments == num_fragments
  assert all(parts)
  assert sorted(x.path for part in parts for x in part) == sorted(shapes)
  for p, part in enumerate(parts):
    assert all(leaf.fragment == p for leaf in part)
    assert layout.num_params(p) == sum(math.prod(x.shape) for x in part)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_input_does_not_matter(kind):
  shapes = decoder_shapes()
  turned = dict(reversed(shapes.items()))

  a = fragments.make_layout(shapes, kind, 5)
  b = fragments.make_layout(turned, kind, 5)

  assert a == b
  assert a.digest() == b.digest()


@hypothesis.given(
  sizes=st.lists(st.integers(1, 60), min_size=1, max_size=7),
  num_fragments=st.integers(1, 3),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_the_fullest_balanced_fragment_is_at_most_4_3_of_the_optimum(
  sizes, num_fragments
):
  hypothesis.assume(num_fragments <= len(sizes))
  shapes = {f"t{i}": ((n,), "float32") for i, n in enumerate(sizes)}

  layout = fragments.make_layout(shapes, "balanced", num_fragments)

  fullest = max(layout.num_params(p) for p in range(num_fragments))
  assert fullest <= 4 / 3 * best_fullest_bin(sizes, num_fragments)
  assert all(layout.fragment(p) for p in range(num_fragments))


def test_balanced_ties_are_broken_by_path():
  shapes = {x: ((2,), "float32") for x in "dcba"}

  layout = fragments.make_layout(shapes, "balanced", 2)

  assert [x.fragment for x in layout.leaves] == [0, 1, 0, 1]


@hypothesis.given(
  sizes=st.lists(st.integers(1, 99), min_size=1, max_size=40),
  data=st.data(),
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_tensor_fragments_are_runs_and_none_is_empty(sizes, data):
  num_fragments = data.draw(st.integers(1, len(sizes)))
  shapes = {f"t{i:02}": ((n,), "float32") for i, n in enumerate(sizes)}

  layout = fragments.make_layout(shapes, "tensor", num_fragments)

  order = [x.fragment for x in layout.leaves]
  assert order == sorted(order)
  assert set(order) == set(range(num_fragments))


def test_tensor_fragments_of_equal_tensors_are_equal():
  shapes = {f"t{i:02}": ((3,), "float32") for i in range(12)}

  layout = fragments.make_layout(shapes, "tensor", 4)

  assert [layout.num_params(p) for p in range(4)] == [9, 9, 9, 9]


def test_tensor_fragments_are_off_by_at_most_half_a_tensor_at_each_end():
  sizes = [5, 1, 4, 4, 2, 6, 3, 1, 7, 2, 2, 3]
  shapes = {f"t{i:02}": ((n,), "float32") for i, n in enumerate(sizes)}

  layout = fragments.make_layout(shapes, "tensor", 4)

  for p in range(4):
    assert abs(layout.num_params(p) - sum(sizes) / 4) <= max(sizes)


@pytest.mark.parametrize(
  ("kind", "expected"),
  [
    ("layer_strided", {0: 0, 1: 1, 2: 2, 3: 0, 9: 0, 10: 1, 11: 2}),
    ("layer_sequential", {0: 0, 1: 0, 3: 0, 4: 1, 7: 1, 8: 2, 10: 2, 11: 2}),
  ],
)
def test_blocks_stay_whole_and_are_counted_as_numbers(kind, expected):
  layout = fragments.make_layout(decoder_shapes(), kind, 3)

  for block, fragment in expected.items():
    found = fragments_of(layout, containing=f"layers_{block}/")
    assert found == [fragment] * 3


def test_what_is_no_block_goes_where_least_is():
  shapes = decoder_shapes(num_layers=3)
  shapes |= {"layers_0/more": ((1000,), "float32")}

  layout = fragments.make_layout(shapes, "layer_strided", 3)

  assert fragments_of(layout, containing="embedding") == [1]
  assert fragments_of(layout, containing="head") == [2]


@pytest.mark.parametrize(
  "path", ["blocks_{}/w", "params/3/{}/w", "Net_0/h/{}/Dense_0/w", "{}/a/w"]
)
def test_a_block_is_the_outermost_number_with_siblings(path):
  shapes = {path.format(i): ((2, 2), "float32") for i in range(4)}

  layout = fragments.make_layout(shapes, "layer_sequential", 2)

  for i in range(4):
    assert fragments_of(layout, containing=path.format(i)) == [i // 2]


def test_more_fragments_than_blocks_is_an_error_with_both_numbers():
  with pytest.raises(ValueError, match=r"5 fragments of 4 blocks.*at most 4"):
    fragments.make_layout(decoder_shapes(num_layers=4), "layer_strided", 5)


def test_a_scanned_stack_has_no_blocks_and_the_error_says_what_to_do():
  shapes = {"layers/w": ((8, 2, 2), "float32"), "head": ((2,), "float32")}

  with pytest.raises(ValueError, match=r"0 blocks.*'balanced'"):
    fragments.make_layout(shapes, "layer_sequential", 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_fragments", [-1, 0, 3])
def test_more_fragments_than_leaves_is_an_error(kind, num_fragments):
  shapes = {"a": ((2,), "float32"), "b": ((2,), "float32")}

  with pytest.raises(
    ValueError, match=f"{num_fragments} fragments of 2 leaves.*between 1 and 2"
  ):
    fragments.make_layout(shapes, kind, num_fragments)


def test_an_unknown_kind_is_an_error_that_names_the_known():
  with pytest.raises(ValueError, match=r"'ballanced'.*balanced, tensor"):
    fragments.make_layout({"a": ((2,), "float32")}, "ballanced", 1)


def test_the_digest_is_that_of_the_protos_test_vector():
  layout = Layout(
    (Leaf("b", "float32", (), 1), Leaf("w/kernel", "float32", (2, 3), 0))
  )

  assert layout.text() == "b\tfloat32\t\t1\nw/kernel\tfloat32\t2,3\t0\n"
  assert layout.digest() == (
    "7b79bdd799c9b99b2aa2d82483cd4746cea361747a6ecd3e8aae2bcfdfd0301a"
  )


def test_leaves_are_ordered_by_utf8_bytes():
  paths = ["b", "a/z", "a-b", "é", "Z", "😀", "\uffff"]

  layout = fragments.make_layout(
    {path: ((1,), "float32") for path in paths}, "tensor", 2
  )

  assert [x.path for x in layout.leaves] == sorted(
    paths, key=lambda path: path.encode()
  )


@pytest.mark.parametrize(
  ("leaves", "message"),
  [
    ([("b", 0), ("a", 0)], "order"),
    ([("a", 0), ("a", 0)], "once"),
    ([("a", 0), ("b", 2)], r"\[0, 2\]"),
    ([("a", 1)], r"\[1\]"),
    ([], r"\[\]"),
    ([("a\tb", 0)], "tab"),
    ([("a\n", 0)], "newline"),
    ([("", 0)], "empty"),
  ],
)
def test_a_layout_that_could_not_be_compared_is_refused(leaves, message):
  with pytest.raises(ValueError, match=message):
    Layout(tuple(Leaf(path, "float32", (1,), p) for path, p in leaves))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (-1,), (-2, -3)])
def test_a_tensor_without_elements_is_refused_by_its_name(shape):
  shapes = {"a": ((2,), "float32"), "b/z": (shape, "float32")}

  with pytest.raises(ValueError, match=r"'b/z' .*at least one element.*Leave"):
    fragments.make_layout(shapes, "balanced", 2)
  with pytest.raises(ValueError, match=r"'b/z' .*at least one element.*Leave"):
    Layout((Leaf("b/z", "float32", shape, 0),))


def test_integers_are_no_parameters():
  with pytest.raises(ValueError, match="'step' is int32"):
    fragments.make_layout({"step": ((), "int32")}, "balanced", 1)


@pytest.mark.parametrize(
  ("other", "sentence"),
  [
    (
      [("a", "float32", (2,), 0), ("c", "bfloat16", (3,), 1)],
      "'b' is float32[2,3] in fragment 1 here, missing there.",
    ),
    (
      [("a", "bfloat16", (2,), 0), ("b", "float32", (2, 3), 1)],
      "'a' is float32[2] in fragment 0 here, bfloat16[2] in fragment 0 there.",
    ),
    (
      [("a", "float32", (2,), 1), ("b", "float32", (2, 3), 0)],
      "'a' is float32[2] in fragment 0 here, float32[2] in fragment 1 there.",
    ),
    (
      [
        ("a", "float32", (2,), 0),
        ("a/b", "float32", (), 0),
        ("b", "float32", (2, 3), 1),
      ],
      "'a/b' is missing here, float32[] in fragment 0 there.",
    ),
  ],
)
def test_the_difference_names_the_first_path_and_both_sides(other, sentence):
  here = Layout(
    (Leaf("a", "float32", (2,), 0), Leaf("b", "float32", (2, 3), 1))
  )

  assert here.difference(Layout(tuple(Leaf(*x) for x in other))) == sentence
  assert here.difference(here) is None


def test_slots_are_spread_over_the_cycle():
  assert [fragments.slot(p, 5, 12) for p in range(5)] == [0, 2, 4, 7, 9]
  assert [fragments.slot(p, 24, 24) for p in range(24)] == list(range(24))


@pytest.mark.parametrize(("p", "num", "cycle"), [(0, 5, 4), (3, 3, 8)])
def test_two_fragments_cannot_share_a_slot(p, num, cycle):
  with pytest.raises(ValueError, match=f"P={num} .* H={cycle} "):
    fragments.slot(p, num, cycle)


def test_unflatten_gives_back_what_flatten_was_given():
  tree = {"b": {"x": {"k": 1}, "a": 2}, "a": 3, "b-c": 4}

  flat = fragments.flatten(tree)

  assert list(flat.items()) == [("a", 3), ("b-c", 4), ("b/a", 2), ("b/x/k", 1)]
  assert fragments.unflatten(flat) == tree


@pytest.mark.parametrize("tree", [{"a/b": 1}, {3: 1}, {"": 1}, {"a": {}}])
def test_a_tree_that_a_path_cannot_tell_is_refused(tree):
  with pytest.raises(ValueError, match=r"key|empty"):
    fragments.flatten(tree)


@pytest.mark.parametrize("flat", [{"a": 1, "a/b": 2}, {"a/b": 2, "a": 1}])
def test_a_path_is_a_leaf_or_a_subtree(flat):
  with pytest.raises(ValueError, match="a path names either"):
    fragments.unflatten(flat)


def test_shapes_of_reads_arrays():
  flat = {"w": np.zeros((2, 3), np.float32), "b": np.float32(1)}

  assert fragments.shapes_of(flat) == {
    "w": ((2, 3), "float32"),
    "b": ((), "float32"),
  }
