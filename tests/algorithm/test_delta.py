"""Deltas have the gradient's sign; adoption overwrites or blends."""

import ml_dtypes
import numpy as np
import pytest

from ddiloco_jax.algorithm.delta import adopt, delta

ALPHAS = (0.0, 0.25, 0.5, 1.0)


def random_fragment(seed, dtype=np.float32):
  rng = np.random.default_rng(seed)
  return {
    "w": rng.normal(size=(3, 4)).astype(dtype),
    "b": np.array(rng.normal(), dtype),
  }


def test_a_delta_is_the_base_minus_the_parameters():
  base = {"w": np.array([1.0, 2.0], np.float32)}
  arrays = {"w": np.array([0.5, 4.0], np.float32)}

  assert delta(base, arrays)["w"].tolist() == [0.5, -2.0]
  assert base["w"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
def test_a_delta_is_taken_in_float32_whatever_the_learner_uses(dtype):
  base, arrays = random_fragment(0), random_fragment(1, dtype)

  result = delta(base, arrays)

  for path, x in result.items():
    assert isinstance(x, np.ndarray)
    assert x.dtype == np.float32
    expected = base[path] - arrays[path].astype(np.float32)
    np.testing.assert_array_equal(x, expected)


def test_a_delta_of_what_is_not_finite_is_left_to_the_guard():
  base = {"w": np.array([np.inf, 1, 3e38], np.float32)}
  arrays = {"w": np.array([np.inf, np.nan, -3e38], np.float32)}

  result = delta(base, arrays)["w"]

  assert np.isnan(result[:2]).all()
  assert np.isinf(result[2])


def test_alpha_0_is_the_global_fragment_exactly_even_over_nan():
  # [N2]
  local, fresh = random_fragment(0), random_fragment(1)
  local["w"][:] = np.nan

  result = adopt(local, fresh, 0.0)

  for path in fresh:
    np.testing.assert_array_equal(result[path], fresh[path])


def test_alpha_1_leaves_the_learner_as_it_is():
  # [N2]
  local, fresh = random_fragment(0), random_fragment(1)
  fresh["w"][:] = np.inf

  result = adopt(local, fresh, 1.0)

  for path in local:
    np.testing.assert_array_equal(result[path], local[path])


def test_between_them_the_two_are_blended():
  local, fresh = random_fragment(0), random_fragment(1)

  result = adopt(local, fresh, 0.25)

  for path in local:
    expected = 0.25 * local[path].astype(float) + 0.75 * fresh[path]
    np.testing.assert_allclose(result[path], expected, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_anchor_is_the_raw_global_for_every_alpha(alpha):
  # [N2]
  local, fresh = random_fragment(0), random_fragment(1)
  kept = {path: x.copy() for path, x in fresh.items()}

  adopted = adopt(local, fresh, alpha)
  adopted["w"] += 1.0

  for path in fresh:
    np.testing.assert_array_equal(fresh[path], kept[path])
    assert not np.shares_memory(adopted[path], fresh[path])
    assert not np.shares_memory(adopted[path], local[path])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_bfloat16_learner_gets_bfloat16(alpha):
  local = random_fragment(0, ml_dtypes.bfloat16)

  result = adopt(local, random_fragment(1), alpha)

  assert all(x.dtype == ml_dtypes.bfloat16 for x in result.values())


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_alpha_is_a_share(alpha):
  with pytest.raises(ValueError, match="alpha is"):
    adopt(random_fragment(0), random_fragment(1), alpha)
