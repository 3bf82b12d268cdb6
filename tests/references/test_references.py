"""The references agree with each other and with cases worked by hand."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.references.fedavg import fedavg
from tests.references.fedopt import fedopt
from tests.references.streaming_diloco import streaming_diloco
from tests.references.synchronous_diloco import rda, synchronous_diloco

PARAMS = {
  "a": np.array([1.0, -2.0, 0.5], np.float32),
  "b": np.array(0.3, np.float32),
  "c": np.ones((2, 2), np.float32),
}


def loss(params, batch):
  """A quadratic bowl whose bottom depends on the batch."""
  return batch["tokens"] * sum(
    jnp.sum((x - batch["target"]) ** 2) for x in params.values()
  )


grad_fn = jax.grad(loss)


def num_tokens(batch):
  return batch["tokens"]


def make_batches(num_learners, num_steps):
  rng = np.random.default_rng(0)
  return [
    [
      {
        "tokens": np.float32(rng.integers(1, 4)),
        "target": np.float32(rng.normal(m, 1)),
      }
      for _ in range(num_steps)
    ]
    for m in range(num_learners)
  ]


def assert_close(a, b, atol=1e-6):
  assert a.keys() == b.keys()
  for path in a:
    np.testing.assert_allclose(a[path], b[path], atol=atol)


def slide(num_learners, num_steps, tokens=(1,)):
  """Batches under which every parameter falls by 0.1 a step at lr 0.1."""
  return [
    [{"tokens": tokens[m % len(tokens)]} for _ in range(num_steps)]
    for m in range(num_learners)
  ]


def constant_grad(params, batch):
  return jax.tree.map(jnp.ones_like, params)


def test_one_learner_with_outer_sgd_of_lr_1_is_plain_training():
  inner = optax.adamw(0.05)
  batches = make_batches(1, 12)

  theta, _ = synchronous_diloco(
    PARAMS, grad_fn, inner, optax.sgd(1.0), batches,
    num_rounds=3, cycle_steps=4, num_tokens=num_tokens,
  )  # fmt: skip

  params, state = PARAMS, inner.init(PARAMS)
  for batch in batches[0]:
    updates, state = inner.update(grad_fn(params, batch), state, params)
    params = optax.apply_updates(params, updates)
  assert_close(theta, params)


@pytest.mark.parametrize("direction", ["rda", "average"])
def test_streaming_with_one_fragment_is_synchronous(direction):
  batches = make_batches(3, 12)
  inner, outer = optax.adamw(0.05), optax.sgd(0.7, 0.5, nesterov=True)
  both = dict(
    cycle_steps=4, num_tokens=num_tokens, direction=direction, averaged=("c",)
  )

  theta, _ = synchronous_diloco(
    PARAMS, grad_fn, inner, outer, batches, num_rounds=3, **both
  )
  streamed, local = streaming_diloco(
    PARAMS, grad_fn, inner, outer, batches,
    num_steps=12, fragments=[tuple(PARAMS)], **both,
  )  # fmt: skip

  assert_close(theta, streamed)
  for params in local:
    assert_close(params, streamed, atol=0)


def test_fedavg_is_diloco_with_a_plain_outer_step():
  batches = make_batches(3, 12)
  both = dict(num_rounds=3, cycle_steps=4, num_tokens=num_tokens)

  theta, _ = fedavg(PARAMS, grad_fn, optax.sgd(0.02), batches, **both)
  expected, _ = synchronous_diloco(
    PARAMS, grad_fn, optax.sgd(0.02), optax.sgd(1.0), batches,
    direction="average", **both,
  )  # fmt: skip

  assert_close(theta, expected)


@pytest.mark.parametrize("outer", [optax.adam(0.1), optax.yogi(0.1)])
def test_fedopt_is_diloco_with_an_adaptive_outer_step(outer):
  batches = make_batches(3, 12)
  both = dict(num_rounds=3, cycle_steps=4, num_tokens=num_tokens)

  theta, _ = fedopt(PARAMS, grad_fn, optax.sgd(0.02), outer, batches, **both)
  expected, _ = synchronous_diloco(
    PARAMS, grad_fn, optax.sgd(0.02), outer, batches,
    direction="average", **both,
  )  # fmt: skip

  assert_close(theta, expected, atol=5e-6)


def test_delay_and_alpha_by_hand():
  theta, [local] = streaming_diloco(
    {"x": np.float32(0)}, constant_grad, optax.sgd(0.1), optax.sgd(1.0),
    slide(1, 5), num_steps=5, cycle_steps=2, fragments=[("x",)],
    num_tokens=num_tokens, delay_steps=1, alpha=0.5,
  )  # fmt: skip

  # Copied after step 2 at -0.2; adopted after step 3 at (-0.3 - 0.2) / 2;
  # copied after step 4 at -0.35, 0.15 below its base; adopted after step 5.
  assert theta["x"] == pytest.approx(-0.35, abs=1e-6)
  assert local["x"] == pytest.approx((-0.45 - 0.35) / 2, abs=1e-6)


@pytest.mark.parametrize(
  ("flush", "expected"), [(False, (-0.4, -0.2)), (True, (-0.5, -0.5))]
)
def test_fragments_are_merged_at_their_offsets(flush, expected):
  theta, _ = streaming_diloco(
    {"x": np.float32(0), "y": np.float32(0)}, constant_grad, optax.sgd(0.1),
    optax.sgd(1.0), slide(2, 5), num_steps=5, cycle_steps=4,
    fragments=[("x",), ("y",)], num_tokens=num_tokens, flush=flush,
  )  # fmt: skip

  np.testing.assert_allclose((theta["x"], theta["y"]), expected, atol=1e-6)


def test_tokens_of_1_to_3_weigh_1_to_9():
  def grad_by_tokens(params, batch):
    return jax.tree.map(lambda x: jnp.ones_like(x) * batch["tokens"], params)

  args = {"x": np.float32(0)}, grad_by_tokens, optax.sgd(0.1)
  batches = slide(2, 1, tokens=(1, 3))
  both = dict(num_rounds=1, cycle_steps=1, num_tokens=num_tokens)

  averaged, _ = fedavg(*args, batches, **both)
  server, _ = fedopt(*args, optax.sgd(1.0), batches, **both)
  diloco, _ = synchronous_diloco(*args, optax.sgd(1.0), batches, **both)

  for theta in (averaged, server, diloco):
    assert theta["x"] == pytest.approx(-0.1 * (1 * 1 + 9 * 3) / 10, abs=1e-6)


def test_rda_of_known_vectors():
  np.testing.assert_allclose(
    rda([(2, 0), (0, 2)], [3, 1]), (1.8973666, 0.6324555), rtol=1e-7
  )
  np.testing.assert_allclose(rda([(1, 0), (-3, 0)], [1, 1]), (-1, 0))


@pytest.mark.parametrize(
  "name", ["synchronous_diloco", "streaming_diloco", "fedavg", "fedopt"]
)
def test_a_reference_imports_nothing_of_ours(name):
  source = pathlib.Path(__file__).with_name(f"{name}.py").read_text()

  imported = {
    alias.name if isinstance(node, ast.Import) else node.module
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Import | ast.ImportFrom)
    for alias in node.names
  }

  assert imported == {"jax", "numpy", "optax"}
