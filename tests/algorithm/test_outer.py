"""The outer step against recurrences written by hand."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from ddiloco_jax.algorithm import delta as deltas
from ddiloco_jax.algorithm import outer
from ddiloco_jax.algorithm.fragments import make_layout
from ddiloco_jax.algorithm.merge import Accumulator, MergeConfig
from ddiloco_jax.algorithm.outer import OuterConfig
from ddiloco_jax.wire import codec

SHAPES = {"w": (4, 3), "b": (3,), "scalar": ()}


def random_fragment(rng):
  return {
    path: np.array(0.1 * rng.normal(size=shape), np.float32)
    for path, shape in SHAPES.items()
  }


def torch_style_nesterov(theta, grads, *, lr, mu):
  """torch.optim.SGD(nesterov=True, dampening=0), in float64."""
  theta = {path: x.astype(np.float64) for path, x in theta.items()}
  buffers = {}
  for grad in grads:
    for path, g in grad.items():
      g = g.astype(np.float64)
      if path in buffers:
        buffers[path] = mu * buffers[path] + g
      else:
        buffers[path] = g
      theta[path] = theta[path] - lr * (g + mu * buffers[path])
  return theta


def is_same(a, b):
  """Whether two trees have the same structure and equal arrays."""
  return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def run(cfg, theta, grads):
  tx = outer.make_outer(cfg)
  state = outer.init(tx, theta)
  for grad in grads:
    theta, state = outer.step(tx, theta, grad, state)
  return theta


@pytest.mark.parametrize(
  ("lr", "mu"), [(0.7, 0.5), (0.7, 0.9), (1.0, 0.0), (0.3, 0.9)]
)
def test_sgd_is_torch_style_nesterov_over_20_steps(lr, mu):
  # [N6]
  rng = np.random.default_rng(0)
  theta = random_fragment(rng)
  grads = [random_fragment(rng) for _ in range(20)]

  found = run(OuterConfig(learning_rate=lr, momentum=mu), theta, grads)

  expected = torch_style_nesterov(theta, grads, lr=lr, mu=mu)
  for path in theta:
    np.testing.assert_allclose(found[path], expected[path], atol=1e-6)


def test_the_first_step_is_lr_times_1_plus_mu_times_delta():
  theta = {"w": np.zeros(3, np.float32)}
  delta = {"w": np.array([1.0, -2.0, 0.5], np.float32)}

  found = run(OuterConfig(learning_rate=0.7, momentum=0.9), theta, [delta])

  np.testing.assert_allclose(found["w"], -0.7 * 1.9 * delta["w"], rtol=1e-6)


@pytest.mark.parametrize(
  ("cfg", "tx"),
  [
    (OuterConfig(name="adam", learning_rate=0.1), optax.adam(0.1)),
    (
      OuterConfig(name="adam", learning_rate=0.1, b2=0.99, eps=1e-3),
      optax.adam(0.1, 0.9, 0.99, 1e-3),
    ),
    (OuterConfig(name="yogi", learning_rate=0.1), optax.yogi(0.1)),
    (OuterConfig(name="adagrad", learning_rate=0.1), optax.adagrad(0.1)),
    (
      OuterConfig(learning_rate=0.5, momentum=0.9, nesterov=False),
      optax.sgd(0.5, 0.9),
    ),
  ],
)
def test_other_optimizers_equal_optax_by_hand(cfg, tx):
  # [N6]
  rng = np.random.default_rng(1)
  theta = random_fragment(rng)
  grads = [random_fragment(rng) for _ in range(20)]

  found = run(cfg, theta, grads)

  params = jax.tree.map(jnp.array, theta)
  state = tx.init(params)
  for grad in grads:
    updates, state = tx.update(jax.tree.map(jnp.array, grad), state, params)
    params = optax.apply_updates(params, updates)
  for path in theta:
    np.testing.assert_allclose(found[path], params[path], atol=1e-6)


def test_adam_equals_its_formula():
  rng = np.random.default_rng(2)
  theta = random_fragment(rng)
  grads = [random_fragment(rng) for _ in range(20)]

  found = run(OuterConfig(name="adam", learning_rate=0.1), theta, grads)

  for path in theta:
    x, m, v = theta[path].astype(np.float64), 0.0, 0.0
    for t, grad in enumerate(grads, 1):
      g = grad[path].astype(np.float64)
      m = 0.9 * m + 0.1 * g
      v = 0.999 * v + 0.001 * g * g
      root = np.sqrt(v / (1 - 0.999**t)) + 1e-8
      x = x - 0.1 * (m / (1 - 0.9**t)) / root
    # optax takes 1 - b2**t in float32, which is off by 6e-5 at t = 1.
    np.testing.assert_allclose(found[path], x, atol=2e-5)


@pytest.mark.parametrize(
  "tx",
  [
    optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    optax.inject_hyperparams(optax.sgd)(learning_rate=0.3, momentum=0.9),
    optax.sgd(optax.linear_schedule(1.0, 0.0, 10)),
    optax.set_to_zero(),
    optax.lion(0.1),
  ],
)
def test_any_optax_transformation_works(tx):
  rng = np.random.default_rng(3)
  theta = random_fragment(rng)
  grads = [random_fragment(rng) for _ in range(5)]

  found, state = theta, outer.init(tx, theta)
  params = jax.tree.map(jnp.array, theta)
  by_hand = tx.init(params)
  for grad in grads:
    found, state = outer.step(tx, found, grad, state)
    updates, by_hand = tx.update(jax.tree.map(jnp.array, grad), by_hand, params)
    params = optax.apply_updates(params, updates)

  assert jax.tree.structure(state) == jax.tree.structure(by_hand)
  for path in theta:
    np.testing.assert_allclose(found[path], params[path], atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_what_went_in_is_neither_written_nor_consumed(name):
  size = 1 << 14  # Large enough for aligned memory, which JAX may alias.
  tx = outer.make_outer(OuterConfig(name=name, momentum=0.9))
  rng = np.random.default_rng(4)
  theta = {"w": rng.normal(size=size).astype(np.float32)}
  delta = {"w": rng.normal(size=size).astype(np.float32)}
  state = outer.init(tx, theta)

  results = []
  for _ in range(5):
    before = jax.tree.map(np.copy, (theta, delta, state))
    new = outer.step(tx, theta, delta, state)
    again = outer.step(tx, theta, delta, state)
    assert is_same(new, again)
    assert is_same(before, (theta, delta, state))
    results.append((new, jax.tree.map(np.copy, new)))
    theta, state = new
    delta = {"w": rng.normal(size=size).astype(np.float32)}

  assert all(is_same(kept, copy) for kept, copy in results)


def test_writing_to_an_input_later_does_not_reach_the_result():
  size = 1 << 14
  tx = optax.set_to_zero()
  theta = {"w": np.ones(size, np.float32)}
  delta = {"w": np.ones(size, np.float32)}

  new, _ = outer.step(tx, theta, delta, outer.init(tx, theta))
  theta["w"][:] = 7
  delta["w"][:] = 7

  assert (new["w"] == 1).all()


def test_a_state_that_was_stored_goes_on_bit_for_bit():
  rng = np.random.default_rng(5)
  tx = outer.make_outer(OuterConfig(momentum=0.9))
  theta = random_fragment(rng)
  grads = [random_fragment(rng) for _ in range(6)]
  state = outer.init(tx, theta)

  stored, stored_state = theta, state
  for grad in grads:
    theta, state = outer.step(tx, theta, grad, state)
    stored = jax.tree.map(np.copy, stored)
    stored_state = jax.tree.map(jnp.array, stored_state)
    stored, stored_state = outer.step(tx, stored, grad, stored_state)

  assert is_same((theta, state), (stored, stored_state))


def test_everything_is_float32_numpy_whatever_comes_in():
  theta = {"w": np.zeros(3, ml_dtypes.bfloat16)}
  tx = outer.make_outer(OuterConfig())

  state = outer.init(tx, theta)
  new, state = outer.step(tx, theta, {"w": np.ones(3)}, state)

  for x in jax.tree.leaves((new, state)):
    assert isinstance(x, np.ndarray)
    assert x.dtype == np.float32


def test_without_momentum_there_is_no_state():
  theta = {"w": np.zeros(3, np.float32)}

  state = outer.init(outer.make_outer(OuterConfig(momentum=0.0)), theta)

  assert jax.tree.leaves(state) == []


def test_an_unknown_optimizer_is_an_error_with_the_nearest():
  with pytest.raises(ValueError, match=r"'adan'.*sgd, adam.*mean 'adam'"):
    outer.make_outer(OuterConfig(name="adan"))


def quadratic_learner(theta, target, *, num_steps, lr):
  for _ in range(num_steps):
    theta = theta - np.float32(lr) * (theta - np.float32(target))
  return theta


def run_quadratic(cfg, num_rounds, targets=(1.0, 3.0)):
  """Two learners on (x - target)^2 / 2, merged by average every 4 steps."""
  layout = make_layout({"x": ((1,), "float32")}, "balanced", 1)
  tx = outer.make_outer(cfg)
  theta = {"x": np.array([10.0], np.float32)}
  state = outer.init(tx, theta)
  for _ in range(num_rounds):
    accumulator = Accumulator(layout.leaves, MergeConfig(direction="average"))
    local = [
      {"x": quadratic_learner(theta["x"], x, num_steps=4, lr=0.1)}
      for x in targets
    ]
    for arrays in local:
      accumulator.add(deltas.delta(theta, arrays), 5.0)
    theta, state = outer.step(tx, theta, accumulator.result(), state)
  return theta["x"][0], [arrays["x"][0] for arrays in local]


def test_lr_1_without_momentum_gives_the_mean_of_the_learners():
  # [N1]
  theta, local = run_quadratic(OuterConfig(learning_rate=1, momentum=0), 1)

  assert theta == pytest.approx(np.mean(local), abs=1e-6)


def test_five_rounds_with_momentum_equal_a_reference():
  # [N1]
  theta, _ = run_quadratic(OuterConfig(learning_rate=1, momentum=0.9), 5)

  x, buffer = 10.0, 0.0
  for _ in range(5):
    ends = []
    for target in (1.0, 3.0):
      end = x
      for _ in range(4):
        end -= 0.1 * (end - target)
      ends.append(end)
    gradient = x - sum(ends) / 2
    buffer = 0.9 * buffer + gradient
    x -= gradient + 0.9 * buffer
  assert theta == pytest.approx(x, abs=1e-5)


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_1000_small_bfloat16_deltas_are_all_felt(mu):
  layout = make_layout({"w": ((5,), "float32")}, "balanced", 1)
  tx = outer.make_outer(OuterConfig(learning_rate=0.7, momentum=mu))
  theta = {"w": np.ones(5, np.float32)}
  state = outer.init(tx, theta)
  sent = {"w": np.full(5, 1e-4, np.float32)}

  for _ in range(1000):
    buffer = codec.encode(sent, layout.leaves, "bfloat16")
    accumulator = Accumulator(layout.leaves, MergeConfig())
    accumulator.add(codec.decode(buffer, layout.leaves, "bfloat16"), 3.0)
    theta, state = outer.step(tx, theta, accumulator.result(), state)

  exact, momentum = 1.0, 0.0
  gradient = float(ml_dtypes.bfloat16(1e-4))
  for _ in range(1000):
    momentum = mu * momentum + gradient
    exact -= 0.7 * (gradient + mu * momentum)
  np.testing.assert_allclose(theta["w"], exact, atol=3e-5)
