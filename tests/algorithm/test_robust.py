"""Robust merges against references in numpy, properties, and the odd cases."""

import math

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

from ddiloco_jax.algorithm.fragments import Leaf, make_layout
from ddiloco_jax.algorithm.merge import Accumulator, MergeConfig
from ddiloco_jax.algorithm.robust import Gatherer, make_accumulator

NAMES = ("clipped", "trimmed_mean", "ties")


def config(direction, **settings):
  return MergeConfig(direction=direction, average_paths=(), **settings)


def merge(vectors, cfg, weights=None):
  """Merges vectors as a fragment of one tensor."""
  arrays = [np.array(v, np.float32) for v in vectors]
  accumulator = make_accumulator(
    (Leaf("w", "float32", arrays[0].shape, 0),), cfg
  )
  for array, weight in zip(arrays, weights or [1.0] * len(arrays)):
    accumulator.add({"w": array}, weight)
  return accumulator.result()["w"]


# --- references, value by value in float64 --------------------------------------


def clipped_reference(vectors, weights, cfg):
  norms = [math.sqrt(math.fsum(float(x) ** 2 for x in v)) for v in vectors]
  longer = sorted(n for n in norms if n)
  median = longer[(len(longer) - 1) // 2] if longer else 0.0
  result = np.zeros(len(vectors[0]))
  for v, n, w in zip(vectors, norms, weights):
    scale = min(1.0, cfg.clip_factor * median / n) if n else 1.0
    result += w / sum(weights) * scale * v.astype(np.float64)
  return result


def trimmed_mean_reference(vectors, weights, cfg):
  num = len(vectors)
  k = min(math.ceil(cfg.trim_fraction * num - 1e-9), (num - 1) // 2)
  result = []
  for column in zip(*vectors):
    low, high = sorted(column)[k], sorted(column)[num - 1 - k]
    kept = [(x, w) for x, w in zip(column, weights) if low <= x <= high]
    result.append(sum(float(x) * w for x, w in kept) / sum(w for _, w in kept))
  return np.array(result)


def ties_reference(vectors, weights, cfg):
  trimmed = []
  for v in vectors:
    num = math.ceil(cfg.ties_keep * len(v))
    least = sorted(abs(v))[len(v) - num]
    trimmed.append([float(x) if abs(x) >= least else 0.0 for x in v])
  norms = [math.sqrt(math.fsum(float(x) ** 2 for x in v)) for v in vectors]
  longer = sorted(n for n in norms if n)
  median = longer[(len(longer) - 1) // 2] if longer else 0.0
  scales = [min(1.0, cfg.clip_factor * median / n) if n else 1.0 for n in norms]
  result = []
  for column in zip(*trimmed):
    values = [x * s for x, s in zip(column, scales)]
    sign = np.sign(sum(values))
    kept = [(x, w) for x, w in zip(values, weights) if x and np.sign(x) == sign]
    total = sum(w for _, w in kept)
    result.append(sum(x * w for x, w in kept) / total if kept else 0.0)
  return np.array(result)


REFERENCES = {
  "clipped": clipped_reference,
  "trimmed_mean": trimmed_mean_reference,
  "ties": ties_reference,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_replies", [2, 3, 4, 5, 8])
def test_it_is_the_reference(name, num_replies):
  rng = np.random.default_rng(num_replies)
  scales = 10.0 ** rng.uniform(-1, 1, num_replies)
  vectors = [np.asarray(s * rng.normal(size=57), np.float32) for s in scales]
  weights = list(rng.uniform(0.1, 1e6, num_replies))
  cfg = config(name)

  got = merge(vectors, cfg, weights)

  want = REFERENCES[name](vectors, weights, cfg)
  np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7 * scales.max())


# --- properties -------------------------------------------------------------------


@st.composite
def rounds(draw, min_replies=1):
  num = draw(st.integers(min_replies, 7))
  shape = (draw(st.integers(1, 5)),)
  values = st.floats(-(2.0**99), 2.0**99, width=32)
  vectors = [
    draw(hnp.arrays(np.float32, shape, elements=values)) for _ in range(num)
  ]
  weights = draw(st.lists(st.floats(1e-12, 1e15), min_size=num, max_size=num))
  return vectors, weights


@pytest.mark.parametrize("name", NAMES)
@hypothesis.given(rounds())
def test_the_result_is_finite_and_no_longer_than_the_longest(name, a_round):
  vectors, weights = a_round

  merged = merge(vectors, config(name), weights)

  assert np.isfinite(merged).all()
  lows, highs = np.min(vectors, axis=0), np.max(vectors, axis=0)
  slack = 1e-6 * np.max(np.abs(vectors), axis=0)
  # Clipping and TIES bring values nearer to 0, and never to its other side.
  assert (merged >= np.minimum(lows, 0) - slack).all()
  assert (merged <= np.maximum(highs, 0) + slack).all()


@pytest.mark.parametrize("name", NAMES)
@hypothesis.given(rounds())
def test_a_round_of_one_is_that_reply_and_of_equals_is_each(name, a_round):
  vectors, weights = a_round
  cfg = config(name, ties_keep=1.0)

  np.testing.assert_array_equal(merge(vectors[:1], cfg), vectors[0])
  merged = merge([vectors[0]] * len(weights), cfg, weights)
  np.testing.assert_allclose(merged, vectors[0], rtol=1e-6, atol=1e-40)


@hypothesis.given(rounds(min_replies=3), st.data())
def test_a_trimmed_mean_lies_between_honest_values(a_round, data):
  vectors, weights = a_round
  num_bad = min(math.ceil(0.2 * len(vectors) - 1e-9), (len(vectors) - 1) // 2)
  honest = vectors[num_bad:]
  at = data.draw(st.permutations(range(len(vectors))))

  merged = merge(
    [vectors[i] for i in at], config("trimmed_mean"), [weights[i] for i in at]
  )

  slack = 1e-6 * np.max(np.abs(honest), axis=0)
  assert (merged >= np.min(honest, axis=0) - slack).all()
  assert (merged <= np.max(honest, axis=0) + slack).all()


@hypothesis.given(rounds(min_replies=2))
def test_no_clipped_reply_is_longer_than_the_bound(a_round):
  vectors, weights = a_round
  norms = sorted(float(np.linalg.norm(v.astype(np.float64))) for v in vectors)
  longer = [n for n in norms if n > 0]
  bound = longer[(len(longer) - 1) // 2] if longer else 0.0

  merged = merge(vectors, config("clipped"), weights)

  assert np.linalg.norm(merged.astype(np.float64)) <= bound * (1 + 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_weights_count_relative_to_each_other_alone(name):
  vectors = [(1, 2), (3, 1), (2, 5), (1.5, 2)]
  weights = [1.0, 3.0, 2.0, 5.0]

  merged = merge(vectors, config(name), weights)

  for factor in (1e-250, 1e250):
    scaled = [w * factor for w in weights]
    np.testing.assert_allclose(
      merge(vectors, config(name), scaled), merged, rtol=1e-6
    )


# --- what each is for ---------------------------------------------------------------

HONEST = [
  (1.0, 2.0, -1.0),
  (1.1, 1.9, -1.0),
  (0.9, 2.1, -1.1),
  (1.0, 2.0, -0.9),
]


@pytest.mark.parametrize(
  ("name", "tolerance"),
  [("clipped", 0.75), ("trimmed_mean", 0.1), ("ties", 0.2)],
)
def test_a_long_reply_that_points_back_does_not_turn_the_merge(name, tolerance):
  attack = -9 * np.mean(HONEST, axis=0)
  replies = [*HONEST, attack]
  cfg = config(name, ties_keep=1.0)

  merged = merge(replies, cfg)
  average = merge(replies, config("average"))

  want = np.mean(HONEST, axis=0)
  assert np.dot(average, want) < 0
  assert np.dot(merged, want) > 0
  assert np.linalg.norm(merged - want) <= tolerance * np.linalg.norm(want)


def test_vectors_by_hand():
  three = [(1.0,), (2.0,), (90.0,)]

  assert merge(three, config("trimmed_mean")) == 2.0
  assert merge(three, config("trimmed_mean", trim_fraction=0.0)) == 31.0
  # The median norm is 2.
  assert merge(three, config("clipped")) == pytest.approx((1 + 2 + 2) / 3)
  twice = config("clipped", clip_factor=2.0)
  assert merge(three, twice) == pytest.approx((1 + 2 + 4) / 3)
  # 3 - 1 - 1 > 0: the first one alone has the sign.
  assert merge([(3.0,), (-1.0,), (-1.0,)], config("ties", clip_factor=9)) == 3.0
  # The larger half of each is kept: 4 of the first, 3 of the second.
  half = config("ties", ties_keep=0.5, clip_factor=9)
  assert merge([(4.0, 1.0), (-1.0, 3.0)], half).tolist() == [4.0, 3.0]


# --- two, none, zeros, faults ---------------------------------------------------------


def test_of_two_replies_none_can_be_trimmed_and_the_longer_is_clipped():
  pair = [(1.0, 0.0), (0.0, 8.0)]

  assert merge(pair, config("trimmed_mean")).tolist() == [0.5, 4.0]
  assert merge(pair, config("clipped")).tolist() == [0.5, 0.5]
  assert merge(pair, config("ties")).tolist() == [1.0, 1.0]
  assert merge([(1.0,), (-1.0,)], config("ties")).tolist() == [0.0]


@pytest.mark.parametrize("name", NAMES)
def test_zero_replies_are_merged_without_a_nan(name):
  zeros = [(0.0, 0.0)] * 3

  assert merge(zeros, config(name)).tolist() == [0.0, 0.0]
  merged = merge([*zeros, (3.0, 4.0)], config(name))
  assert np.isfinite(merged).all()


def test_who_has_nothing_to_say_does_not_silence_who_has():
  merged = merge([(0.0, 0.0), (0.0, 0.0), (3.0, 4.0)], config("clipped"))

  np.testing.assert_allclose(merged, (1.0, 4 / 3), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_of_weight_zero_changes_nothing_and_alone_is_an_error(name):
  replies = [(1.0, 2.0), (2.0, 1.0), (2.0, 2.0)]

  with_zero = merge([*replies, (50.0, -9.0)], config(name), [1, 2, 3, 0])

  np.testing.assert_array_equal(
    with_zero, merge(replies, config(name), [1, 2, 3])
  )
  with pytest.raises(ValueError, match="no reply has a weight above 0"):
    merge(replies, config(name), [0.0, 0.0, 0.0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reply_at_fault_is_refused_and_nothing_of_it_is_kept(name, bad):
  accumulator = Gatherer((Leaf("w", "float32", (2,), 0),), config(name))
  accumulator.add({"w": np.array([1, 2], np.float32)}, 1.0)

  with pytest.raises(ValueError, match="'w'"):
    accumulator.add({"w": np.array([1, bad], np.float32)}, 1.0)
  with pytest.raises(ValueError, match="weight"):
    accumulator.add({"w": np.array([1, 1], np.float32)}, bad)

  assert accumulator.result()["w"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", NAMES)
def test_average_paths_are_averaged(name):
  shapes = {"embed": (3,), "w": (3,)}
  layout = make_layout(
    {p: (s, "float32") for p, s in shapes.items()}, "tensor", 1
  )
  rng = np.random.default_rng(0)
  replies = [
    {p: rng.normal(size=s).astype(np.float32) for p, s in shapes.items()}
    for _ in range(5)
  ]
  found = {}
  for cfg in (MergeConfig(direction=name), MergeConfig(direction="average")):
    accumulator = make_accumulator(layout.leaves, cfg)
    for reply in replies:
      accumulator.add(reply, 1.0)
    found[cfg.direction] = accumulator.result()

  assert list(found[name]) == ["embed", "w"]
  np.testing.assert_array_equal(found[name]["embed"], found["average"]["embed"])
  assert (found[name]["w"] != found["average"]["w"]).any()


def test_one_norm_for_a_fragment_clips_its_tensors_together():
  leaves = (Leaf("a", "float32", (1,), 0), Leaf("b", "float32", (1,), 0))
  replies = [(3.0, 4.0), (3.0, 4.0), (0.0, 50.0)]
  merged = {}
  for per in ("tensor", "fragment"):
    accumulator = Gatherer(leaves, config("clipped", per=per, clip_factor=1.0))
    for a, b in replies:
      delta = {"a": np.array([a], np.float32), "b": np.array([b], np.float32)}
      accumulator.add(delta, 1.0)
    merged[per] = {x: float(v[0]) for x, v in accumulator.result().items()}

  assert merged["tensor"] == pytest.approx({"a": 2.0, "b": 4.0})
  assert merged["fragment"] == pytest.approx({"a": 2.0, "b": 13 / 3})


@pytest.mark.parametrize("name", [*NAMES, "rda", "average"])
def test_an_array_without_dimensions_is_merged_as_one_of_one_number(name):
  numbers = [np.float32(x) for x in (0.5, -3.0, 2.0, 0.25)]

  merged = merge([np.array(x) for x in numbers], config(name))
  other = merge([np.array([x]) for x in numbers], config(name))

  assert (merged.shape, other.shape) == ((), (1,))
  assert merged.tobytes() == other.tobytes()


def test_matrices_keep_their_shape_and_the_order_of_acceptance_its_bits():
  rng = np.random.default_rng(0)
  matrices = [rng.normal(size=(3, 40_000)).astype(np.float32) for _ in range(4)]

  for name in NAMES:
    first, again = (merge(matrices, config(name)) for _ in range(2))
    assert first.shape == (3, 40_000)
    assert first.tobytes() == again.tobytes()


def test_the_ordinary_merges_are_still_streamed():
  leaf = Leaf("w", "float32", (2,), 0)

  for direction in ("rda", "average"):
    made = make_accumulator((leaf,), MergeConfig(direction=direction))
    assert isinstance(made, Accumulator)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"clip_factor": 0.5}, "merge.clip_factor is 0.5: it must be at least 1"),
    ({"clip_factor": math.nan}, "merge.clip_factor is nan"),
    ({"trim_fraction": 0.5}, "merge.trim_fraction is 0.5: .* 0..0.5"),
    ({"ties_keep": 0.0}, "merge.ties_keep is 0.0: .* above 0"),
    ({"direction": "trimmed"}, "merge.direction is 'trimmed'.*'trimmed_mean'"),
  ],
)
def test_settings_that_cannot_be_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    MergeConfig(**change)
