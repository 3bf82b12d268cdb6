"""Average and RDA against vectors, a float64 reference and the odd cases."""

import math
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ddiloco_jax.algorithm import merge
from ddiloco_jax.algorithm.fragments import Leaf, make_layout
from ddiloco_jax.algorithm.merge import Accumulator, MergeConfig

RDA = MergeConfig(average_paths=())
AVERAGE = MergeConfig(direction="average")


def merge_vectors(replies, cfg=RDA):
  """Merges (vector, weight) pairs as a fragment of one tensor."""
  arrays = [np.array(v, np.float32) for v, _ in replies]
  accumulator = Accumulator((Leaf("w", "float32", arrays[0].shape, 0),), cfg)
  for array, (_, weight) in zip(arrays, replies):
    accumulator.add({"w": array}, weight)
  return accumulator.result()["w"]


def merge_fragments(shapes, replies, cfg):
  layout = make_layout(
    {path: (shape, "float32") for path, shape in shapes.items()}, "tensor", 1
  )
  accumulator = Accumulator(layout.leaves, cfg)
  for delta, weight in replies:
    accumulator.add(delta, weight)
  return accumulator.result()


def random_replies(shapes, num_replies, seed=0):
  rng = np.random.default_rng(seed)
  scales = 10.0 ** rng.uniform(-3, 3, num_replies)
  return [
    (
      {
        path: np.asarray(scale * rng.normal(size=shape), np.float32)
        for path, shape in shapes.items()
      },
      float(rng.uniform(0.1, 1e6)),
    )
    for scale in scales
  ]


def rda_in_float64(vectors, weights):
  """The formula as it is written: mean norm times direction of the mean."""
  vectors = [np.asarray(v, np.float64).ravel() for v in vectors]
  norms = [math.sqrt(math.fsum(v * v)) for v in vectors]
  phi = [v / n if n else v for v, n in zip(vectors, norms)]
  mean_norm = np.dot(weights, norms) / np.sum(weights)
  mean_phi = sum(w * v for w, v in zip(weights, phi)) / np.sum(weights)
  length = np.linalg.norm(mean_phi)
  if length < 1e-12:
    return average_in_float64(vectors, weights)
  return mean_norm * mean_phi / length


def average_in_float64(vectors, weights):
  vectors = [np.asarray(v, np.float64).ravel() for v in vectors]
  return sum(w * v for w, v in zip(weights, vectors)) / np.sum(weights)


@pytest.mark.parametrize(
  ("replies", "expected"),
  [
    ([((2, 0), 3), ((0, 2), 1)], (1.8973666, 0.6324555)),
    ([((1, 0), 1), ((0, 1), 1)], (0.70710677, 0.70710677)),
    ([((1, 0), 1), ((0, 0), 1)], (0.5, 0.0)),
    ([((3, 4), 2), ((0, 0), 0)], (3.0, 4.0)),
  ],
)
def test_rda_of_known_vectors(replies, expected):
  # [N15]
  np.testing.assert_allclose(merge_vectors(replies), expected, rtol=2e-7)


def test_the_average_is_weighted():
  merged = merge_vectors([((2.0,), 100), ((4.0,), 50)], AVERAGE)

  np.testing.assert_allclose(merged, [2.6666667], rtol=1e-7)


def test_tokens_of_1_to_3_at_equal_steps_weigh_1_to_9():
  steps, tokens = 10, (100, 300)
  weights = [c * (c / steps) for c in tokens]

  merged = merge_vectors([((1.0,), weights[0]), ((2.0,), weights[1])], AVERAGE)

  np.testing.assert_allclose(merged, [(1 * 1 + 9 * 2) / 10], rtol=1e-7)


@pytest.mark.parametrize("cfg", [RDA, AVERAGE, MergeConfig(per="fragment")])
def test_one_reply_is_merged_bit_for_bit(cfg):
  shapes = {"embed": (7, 3), "w": (5,), "zero": (2,), "scalar": ()}
  [(delta, _)] = random_replies(shapes, 1)
  delta["zero"][:] = 0
  delta["w"][0] = 1e-42

  merged = merge_fragments(shapes, [(delta, 123.4)], cfg)

  for path in shapes:
    assert merged[path].tobytes() == delta[path].tobytes()


def test_a_reply_without_weight_changes_no_bit():
  first, second, third = ((1.3, -2), 3.3), ((7, 7), 0), ((0.1, 5), 2.2)

  with_it = merge_vectors([second, first, second, third])
  without = merge_vectors([first, third])
  lone = merge_vectors([second, first])

  assert with_it.tobytes() == without.tobytes()
  assert lone.tolist() == np.array(first[0], np.float32).tolist()


def test_weights_that_are_all_0_are_an_error_and_no_nan():
  with pytest.raises(ValueError, match="no reply has a weight above 0"):
    merge_vectors([((1, 2), 0), ((3, 4), 0)])


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_a_weight_is_a_finite_number_from_0(weight):
  with pytest.raises(ValueError, match="weight is"):
    merge_vectors([((1, 2), weight)])


@pytest.mark.parametrize("cfg", [RDA, AVERAGE])
def test_zero_deltas_merge_to_zero(cfg):
  # [N15]
  merged = merge_vectors([((0, 0), 1), ((0, 0), 5), ((0, 0), 2)], cfg)

  assert merged.tolist() == [0, 0]


def test_zero_vectors_count_in_the_mean_norm_only():
  merged = merge_vectors([((3, 4), 1), ((0, 0), 3), ((3, 4), 1)])

  np.testing.assert_allclose(merged, [3 * 2 / 5, 4 * 2 / 5], rtol=2e-7)


@pytest.mark.parametrize(
  ("replies", "average"),
  [
    ([((1, 2), 1), ((-1, -2), 1)], (0, 0)),
    ([((1, 0), 1), ((-3, 0), 1)], (-1, 0)),
    ([((49, 0), 2), ((-3, 0), 2)], (23, 0)),
    ([((3, 4), 1), ((-6, -8), 1)], (-1.5, -2)),
    ([((3, 4), 1), ((-9, -12), 1)], (-3, -4)),
    ([((1, 0), 3), ((0, 0), 4), ((-4, 0), 3)], (-0.9, 0)),
    ([((1, 0), 2), ((-2, 0), 1), ((-5, 0), 1)], (-1.25, 0)),
  ],
)
def test_directions_that_cancel_fall_back_to_the_average(replies, average):
  np.testing.assert_allclose(
    merge_vectors(replies), average, rtol=3e-7, atol=1e-12
  )


def test_nearly_opposite_directions_are_not_taken_for_cancelled():
  merged = merge_vectors([((1, 0), 1), ((-1, 1e-4), 1)])

  np.testing.assert_allclose(merged, [0, 1], atol=1e-4)


@pytest.mark.parametrize("num_replies", [2, 4, 8, 16])
def test_the_scale_of_rda_does_not_depend_on_the_number_of_learners(
  num_replies,
):
  # [N15]
  vectors = 2.5 * np.eye(16, dtype=np.float32)[:num_replies]

  merged = merge_vectors([(v, 1) for v in vectors])
  averaged = merge_vectors([(v, 1) for v in vectors], AVERAGE)

  assert np.linalg.norm(merged) == pytest.approx(2.5, rel=1e-6)
  shrunk = 2.5 / math.sqrt(num_replies)
  assert np.linalg.norm(averaged) == pytest.approx(shrunk, rel=1e-6)


@hypothesis.given(
  vectors=st.lists(
    st.lists(
      st.floats(-1e3, 1e3, width=32).filter(lambda x: abs(x) > 1e-3),
      min_size=3,
      max_size=3,
    ),
    min_size=1,
    max_size=6,
  ),
  data=st.data(),
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_rda_has_the_mean_norm_and_equals_the_formula(vectors, data):
  weights = data.draw(
    st.lists(
      st.floats(0.01, 1e9),
      min_size=len(vectors),
      max_size=len(vectors),
    )
  )
  phi = [np.array(v) / np.linalg.norm(v) for v in vectors]
  mean_phi = np.average(phi, axis=0, weights=weights)
  hypothesis.assume(np.linalg.norm(mean_phi) > 1e-3)

  merged = merge_vectors(list(zip(vectors, weights)))

  # Rounding of the sum, 1e-7, over the least length of the mean, 1e-3.
  expected = rda_in_float64(vectors, weights)
  error = np.linalg.norm(merged - expected) / np.linalg.norm(expected)
  assert error < 1e-3
  mean_norm = np.average(np.linalg.norm(vectors, axis=1), weights=weights)
  assert np.linalg.norm(merged) == pytest.approx(mean_norm, rel=1e-6)


def test_tensors_are_merged_apart_and_embeddings_are_averaged():
  shapes = {
    "embedding": (9, 4),
    "head": (4, 9),
    "layers_0/attention/query": (4, 2, 2),
    "layers_0/norm/scale": (4,),
    "scalar": (),
  }
  replies = random_replies(shapes, 5)

  merged = merge_fragments(shapes, replies, MergeConfig())

  weights = [w for _, w in replies]
  for path, shape in shapes.items():
    vectors = [delta[path] for delta, _ in replies]
    averaged = path in ("embedding", "head")
    formula = average_in_float64 if averaged else rda_in_float64
    expected = formula(vectors, weights).reshape(shape)
    assert merged[path].shape == shape
    assert merged[path].dtype == np.float32
    scale = np.abs(expected).max()
    np.testing.assert_allclose(merged[path], expected, atol=2e-6 * scale)


def test_per_fragment_all_tensors_but_the_averaged_are_one_vector():
  shapes = {"a": (3, 2), "b": (5,), "tok_embed/table": (4,)}
  replies = random_replies(shapes, 4)

  merged = merge_fragments(shapes, replies, MergeConfig(per="fragment"))

  weights = [w for _, w in replies]
  joined = [np.concatenate([d["a"].ravel(), d["b"]]) for d, _ in replies]
  expected = rda_in_float64(joined, weights)
  found = np.concatenate([merged["a"].ravel(), merged["b"]])
  np.testing.assert_allclose(
    found, expected, atol=2e-6 * np.abs(expected).max()
  )
  table = [d["tok_embed/table"] for d, _ in replies]
  expected = average_in_float64(table, weights)
  np.testing.assert_allclose(
    merged["tok_embed/table"], expected, atol=2e-6 * np.abs(expected).max()
  )


@pytest.mark.parametrize(
  ("path", "averaged"),
  [
    ("embedding", True),
    ("Embed_0/embedding", True),
    ("model/embed_tokens/weight", True),
    ("lm_head/kernel", True),
    ("decoder/head", True),
    ("layers_0/attention/num_heads", False),
    ("layers_0/overhead/kernel", False),
    ("layers_0/mlp/up", False),
  ],
)
def test_default_average_paths(path, averaged):
  replies = [({path: np.eye(2, dtype=np.float32)[i]}, 1.0) for i in (0, 1)]

  merged = merge_fragments({path: (2,)}, replies, MergeConfig())[path]

  each = 0.5 if averaged else math.sqrt(0.5)
  np.testing.assert_allclose(merged, [each, each], rtol=1e-6)


@pytest.mark.parametrize("cfg", [RDA, AVERAGE])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_reply_that_is_not_finite_leaves_no_trace(cfg, bad):
  shapes = {"a": (3,), "b": (2, 2)}
  replies = random_replies(shapes, 3)
  faulty = {path: x.copy() for path, x in replies[0][0].items()}
  faulty["b"][1, 1] = bad
  layout = make_layout(
    {path: (shape, "float32") for path, shape in shapes.items()}, "tensor", 1
  )

  accumulator = Accumulator(layout.leaves, cfg)
  for delta, weight in replies:
    with pytest.raises(ValueError, match="'b' has the norm"):
      accumulator.add(faulty, 1.0)
    accumulator.add(delta, weight)

  expected = merge_fragments(shapes, replies, cfg)
  for path, x in accumulator.result().items():
    assert x.tobytes() == expected[path].tobytes()


@pytest.mark.parametrize("cfg", [MergeConfig(), AVERAGE])
def test_what_is_added_is_never_written_in_any_memory_order(cfg):
  shapes = {"a": (3, 2), "scalar": (), "embed": (4,)}
  replies = random_replies(shapes, 4)
  expected = merge_fragments(shapes, replies, cfg)
  for delta, _ in replies:
    delta["a"] = np.asfortranarray(delta["a"])
    for x in delta.values():
      x.flags.writeable = False

  merged = merge_fragments(shapes, replies, cfg)

  for path in shapes:
    np.testing.assert_allclose(merged[path], expected[path], rtol=1e-6)


def test_identical_replies_merge_to_themselves():
  vector = np.random.default_rng(0).normal(size=50)

  merged = merge_vectors([(vector, w) for w in (1e-3, 1.0, 1e12)])

  np.testing.assert_allclose(merged, vector, rtol=1e-6)


def test_huge_and_tiny_deltas_neither_overflow_nor_vanish():
  for scale in (1e-38, 1e30):
    merged = merge_vectors([((scale, 0), 1e15), ((0, scale), 1e15)])
    np.testing.assert_allclose(
      merged / np.float32(scale), [math.sqrt(0.5)] * 2, rtol=1e-6
    )


def test_the_norm_of_many_numbers_is_summed_in_float64():
  array = np.full(1 << 24, 0.1, np.float32)

  exact = float(np.float32(0.1)) * math.sqrt(1 << 24)

  assert merge.norm({"w": array}) == pytest.approx(exact, rel=1e-12)
  assert merge.norm({"a": np.float32(3), "b": np.float32(4)}) == 5
  assert merge.norm({}) == 0


def test_the_norm_of_what_is_not_finite_is_not_finite():
  assert merge.norm({"w": np.array([1, np.inf], np.float32)}) == math.inf
  assert math.isnan(merge.norm({"w": np.array([1, np.nan], np.float32)}))
  assert math.isfinite(merge.norm({"w": np.full(99, 3e38, np.float32)}))


@pytest.mark.parametrize(("cfg", "num_sums"), [(RDA, 2), (AVERAGE, 1)])
def test_memory_does_not_grow_with_the_number_of_replies(cfg, num_sums):
  size = 1 << 20
  rng = np.random.default_rng(0)
  accumulator = Accumulator((Leaf("w", "float32", (size,), 0),), cfg)

  tracemalloc.start()
  for _ in range(6):
    delta = {"w": rng.standard_normal(size, np.float32)}
    accumulator.add(delta, 1.0)
    del delta
  accumulator.result()
  _, peak_bytes = tracemalloc.get_traced_memory()
  tracemalloc.stop()

  # The sums, the reply that is added, and the first one until it is in them;
  # a twentieth for the chunks.
  assert peak_bytes <= 4 * size * (num_sums + 2) * 1.05 + (2 << 20)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"direction": "rdaa"}, "merge.direction is 'rdaa'.*mean 'rda'"),
    ({"per": "layer"}, "merge.per is 'layer'.*tensor, fragment"),
  ],
)
def test_an_unknown_choice_is_an_error_with_the_nearest(change, message):
  with pytest.raises(ValueError, match=message):
    MergeConfig(**change)
