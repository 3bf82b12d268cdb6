"""The arithmetic alone, driven by a plain loop, against the references."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddiloco_jax.algorithm import delta, outer
from ddiloco_jax.algorithm.fragments import make_layout, shapes_of, slot
from ddiloco_jax.algorithm.merge import Accumulator, MergeConfig
from ddiloco_jax.algorithm.outer import OuterConfig
from tests.references.streaming_diloco import streaming_diloco

H, DELAY_STEPS, NUM_STEPS = 6, 2, 20


def make_problem():
  rng = np.random.default_rng(0)
  params = {
    "embedding": rng.normal(size=(5, 3)),
    "layers_0/w": rng.normal(size=(3, 3)),
    "layers_1/w": rng.normal(size=(3, 3)),
    "scale": np.ones(3),
  }
  params = {path: x.astype(np.float32) for path, x in params.items()}
  batches = [
    [
      (rng.integers(0, 5, n), rng.normal(m, 1, (n, 3)).astype(np.float32))
      for n in (m % 2 + 2 for _ in range(NUM_STEPS))
    ]
    for m in range(3)
  ]
  return params, batches


@jax.grad
def grad_fn(params, batch):
  tokens, targets = batch
  x = params["embedding"][tokens]
  x = jnp.tanh(x @ params["layers_0/w"]) @ params["layers_1/w"]
  return jnp.sum((x * params["scale"] - targets) ** 2)


def num_tokens(batch):
  return len(batch[0])


class Learner:
  """Section 2 of the algorithm without a protocol."""

  def __init__(self, params, inner, batches, num_fragments):
    self.params, self.batches = params, batches
    self.inner, self.state = inner, inner.init(params)
    self.base = dict(params)
    self.steps = [0] * num_fragments
    self.tokens = [0] * num_fragments
    self.grads = jax.jit(grad_fn)

  def train_step(self, t):
    batch = self.batches[t - 1]
    updates, self.state = self.inner.update(
      self.grads(self.params, batch), self.state, self.params
    )
    self.params = optax.apply_updates(self.params, updates)
    self.steps = [n + 1 for n in self.steps]
    self.tokens = [n + num_tokens(batch) for n in self.tokens]

  def reply(self, p, leaves):
    base = {x.path: self.base[x.path] for x in leaves}
    arrays = {x.path: self.params[x.path] for x in leaves}
    weight = self.tokens[p] * (self.tokens[p] / self.steps[p])
    return delta.delta(base, arrays), weight

  def adopt(self, p, fresh, alpha):
    local = {path: self.params[path] for path in fresh}
    self.params = self.params | delta.adopt(local, fresh, alpha)
    self.base |= fresh
    self.steps[p] = self.tokens[p] = 0


@pytest.mark.parametrize("direction", ["rda", "average"])
@pytest.mark.parametrize(("num_fragments", "alpha"), [(1, 0.0), (3, 0.5)])
def test_streaming_diloco(direction, num_fragments, alpha):
  params, batches = make_problem()
  layout = make_layout(shapes_of(params), "balanced", num_fragments)
  parts = [layout.fragment(p) for p in range(num_fragments)]
  tx = outer.make_outer(OuterConfig(learning_rate=0.7, momentum=0.5))
  inner = optax.adamw(0.01)
  theta = [{x.path: params[x.path] for x in part} for part in parts]
  states = [outer.init(tx, x) for x in theta]
  learners = [Learner(params, inner, x, num_fragments) for x in batches]

  adopt_at = {}
  for t in range(1, NUM_STEPS + 1):
    for learner in learners:
      learner.train_step(t)
    for p, part in enumerate(parts):
      if t % H == slot(p, num_fragments, H):
        accumulator = Accumulator(part, MergeConfig(direction=direction))
        for learner in learners:
          accumulator.add(*learner.reply(p, part))
        theta[p], states[p] = outer.step(
          tx, theta[p], accumulator.result(), states[p]
        )
        adopt_at[p] = t + DELAY_STEPS
      if adopt_at.get(p) == t:
        for learner in learners:
          learner.adopt(p, theta[p], alpha)

  expected, local = streaming_diloco(
    params,
    grad_fn,
    inner,
    optax.sgd(0.7, 0.5, nesterov=True),
    batches,
    num_steps=NUM_STEPS,
    cycle_steps=H,
    fragments=[tuple(x.path for x in part) for part in parts],
    num_tokens=num_tokens,
    delay_steps=DELAY_STEPS,
    alpha=alpha,
    direction=direction,
    averaged=("embedding",),
  )
  found = {path: x for part in theta for path, x in part.items()}
  for path in params:
    np.testing.assert_allclose(found[path], expected[path], atol=1e-5)
    assert np.abs(found[path] - params[path]).max() > 1e-3
    for learner, x in zip(learners, local):
      np.testing.assert_allclose(learner.params[path], x[path], atol=1e-5)
