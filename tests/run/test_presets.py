"""Special cases that are other algorithms, on the real syncer and loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddiloco_jax import config
from ddiloco_jax.learner.learner import LearnerConfig
from tests.references.fedavg import fedavg
from tests.references.fedopt import fedopt
from tests.references.streaming_diloco import streaming_diloco
from tests.references.synchronous_diloco import synchronous_diloco
from tests.support.functional import Functional
from tests.support.in_process import syncer_run, train_all

H = 6
NUM_LEARNERS = 3
OWN = LearnerConfig(lr_index="own")


def params0():
  rng = np.random.default_rng(0)
  shapes = {
    "a/kernel": (4, 8),
    "b/kernel": (8, 3),
    "a/bias": (8,),
    "b/bias": (3,),
  }
  return {
    k: rng.normal(size=s).astype(np.float32) / 2 for k, s in shapes.items()
  }


def loss(params, batch):
  hidden = jnp.tanh(batch["x"] @ params["a/kernel"] + params["a/bias"])
  out = hidden @ params["b/kernel"] + params["b/bias"]
  return jnp.mean((out - batch["y"]) ** 2)


grad_fn = jax.grad(loss)


def make_batches(shard):
  def batch(position):
    rng = np.random.default_rng([shard, position])
    tokens = 8 * (shard + 1)  # Learners of unequal size.
    x = rng.normal(size=(tokens, 4)).astype(np.float32)
    y = np.sin(x[:, :3] + shard).astype(np.float32)
    return {"x": x, "y": y, "weights": np.ones(tokens, np.float32)}

  return batch


def batches(num_learners, num_steps):
  made = []
  for shard in range(num_learners):
    all_of_it = [make_batches(shard)(i) for i in range(num_steps)]
    made.append([{"x": b["x"], "y": b["y"]} for b in all_of_it])
  return made


def num_tokens(batch):
  return len(batch["x"])


def settings(num_steps, num_learners=NUM_LEARNERS, P=1, **sync):
  cfg = config.default()
  cfg.fragments.num_fragments = P
  cfg.sync.cycle_steps = H
  cfg.sync.quorum = num_learners
  cfg.sync.num_syncer_steps = num_steps
  cfg.sync.wait_for_publication = True
  cfg.sync.max_open_rounds = 8
  cfg.sync.num_shards = cfg.sync.max_learners = num_learners
  cfg.sync.update(sync)
  cfg.wire.up_format = "float32"
  cfg.run.seed = 0
  return config.freeze(cfg)


def run(tmp_path, cfg, inner, tx, num_learners=NUM_LEARNERS, theta=None):
  """Returns the final global parameters and every learner's."""
  theta = theta or params0()
  trainers = [Functional(theta, grad_fn, inner) for _ in range(num_learners)]
  with syncer_run(cfg, tmp_path / "run", theta=theta, tx=tx) as served:
    finished = train_all(served, trainers, make_batches, OWN)
    tensors, _ = served.syncer.snapshot()
  assert finished.exit_code == 0, finished
  final = {k: x for part in tensors.theta for k, x in part.items()}
  return final, [t.params for t in trainers]


def assert_close(got, want, tolerance=2e-5):
  assert got.keys() == want.keys()
  for k in want:
    np.testing.assert_allclose(got[k], want[k], rtol=0, atol=tolerance)


def average_only(cfg):
  merge = dataclasses.replace(cfg.merge, direction="average")
  return dataclasses.replace(cfg, merge=merge)


def test_one_learner_with_outer_sgd_equals_plain_training(tmp_path):
  cfg = average_only(settings(4 * H, num_learners=1))
  inner = optax.adam(1e-2)

  final, (local,) = run(tmp_path, cfg, inner, optax.sgd(1.0), num_learners=1)

  plain = Functional(params0(), grad_fn, inner)
  for batch in batches(1, 4 * H)[0]:
    plain.step(batch, 0)
  assert_close(final, plain.params)
  assert_close(local, plain.params)


@pytest.mark.parametrize("direction", ["rda", "average"])
def test_all_learners_and_one_fragment_equal_synchronous_diloco(
  tmp_path, direction
):
  cfg = settings(4 * H)
  if direction == "average":
    cfg = average_only(cfg)
  inner, outer = optax.adam(1e-2), optax.sgd(0.7, 0.9, nesterov=True)

  final, locals_ = run(tmp_path, cfg, inner, outer)

  want, _ = synchronous_diloco(
    params0(),
    grad_fn,
    inner,
    outer,
    batches(NUM_LEARNERS, 4 * H),
    num_rounds=4,
    cycle_steps=H,
    num_tokens=num_tokens,
    direction=direction,
  )
  assert_close(final, want)
  for local in locals_:
    assert_close(local, want)


@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.0), (2, 0.5)])
def test_fragments_apart_equal_streaming_diloco(tmp_path, delay, alpha):
  num_steps = 4 * H
  cfg = settings(num_steps, P=2, adoption_delay_steps=delay, alpha=alpha)
  inner, outer = optax.adam(1e-2), optax.sgd(0.7, 0.9, nesterov=True)

  final, locals_ = run(tmp_path, cfg, inner, outer)

  want, _ = streaming_diloco(
    params0(),
    grad_fn,
    inner,
    outer,
    batches(NUM_LEARNERS, num_steps),
    num_steps=num_steps,
    cycle_steps=H,
    fragments=paths_of(cfg),
    num_tokens=num_tokens,
    delay_steps=delay,
    alpha=alpha,
    flush=True,
  )
  assert_close(final, want)
  for local in locals_:
    assert_close(local, want)


def test_outer_sgd_of_rate_one_equals_fedavg(tmp_path):
  cfg = average_only(settings(3 * H))
  inner = optax.sgd(0.05)

  final, locals_ = run(tmp_path, cfg, inner, optax.sgd(1.0))

  want, _ = fedavg(
    params0(),
    grad_fn,
    inner,
    batches(NUM_LEARNERS, 3 * H),
    num_rounds=3,
    cycle_steps=H,
    num_tokens=num_tokens,
  )
  assert_close(final, want)
  for local in locals_:
    assert_close(local, want)


@pytest.mark.parametrize("outer", [optax.adam(0.02), optax.yogi(0.02)])
def test_adaptive_outer_optimizers_equal_fedopt(tmp_path, outer):
  cfg = average_only(settings(3 * H))
  inner = optax.sgd(0.05)

  final, _ = run(tmp_path, cfg, inner, outer)

  want, _ = fedopt(
    params0(),
    grad_fn,
    inner,
    outer,
    batches(NUM_LEARNERS, 3 * H),
    num_rounds=3,
    cycle_steps=H,
    num_tokens=num_tokens,
  )
  assert_close(final, want, 1e-4)


def paths_of(cfg):
  from ddiloco_jax.algorithm import fragments

  layout = fragments.make_layout(
    fragments.shapes_of(params0()), cfg.fragments.kind, 2
  )
  return [[leaf.path for leaf in layout.fragment(p)] for p in range(2)]
