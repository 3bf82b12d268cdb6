"""The training step against gradients and optimizers taken by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddiloco_jax.models.transformer import ModelConfig, make_model
from ddiloco_jax.training.mesh import MeshConfig, make_mesh, place_batch
from ddiloco_jax.training.parts import put
from ddiloco_jax.training.step import (
  TrainConfig,
  abstract_state,
  init_state,
  learning_rate,
  make_train_step,
  state_from_params,
)

TINY = ModelConfig(
  vocab_size=17,
  embed_dim=8,
  num_layers=1,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  mlp_dim=12,
)
SGD = TrainConfig(
  batch_size=4,
  seq_len=6,
  learning_rate=0.5,
  warmup_steps=0,
  decay_steps=100,
  min_lr_ratio=0.0,
  optimizer="sgd",
  weight_decay=0.0,
  clip_norm=0.0,
)
MODEL = make_model(TINY)
MESH = make_mesh(MeshConfig())


def make_batch(seed=0, rows=4):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, TINY.vocab_size, (rows, 7), dtype=np.int32)
  weights = np.ones((rows, 6), np.float32)
  weights[1, 2:] = 0  # Rows of unequal length.
  return {
    "inputs": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "weights": weights,
  }


def mean_nats(params, batch):
  """The loss written apart: without a library's cross entropy."""
  logits = MODEL.apply({"params": params}, batch["inputs"])
  share = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
  true = jax.nn.one_hot(batch["targets"], TINY.vocab_size)
  nats = -jnp.log((share * true).sum(-1))
  return (batch["weights"] * nats).sum() / batch["weights"].sum()


by_hand = jax.jit(jax.value_and_grad(mean_nats))


def on_host(tree):
  return jax.tree.map(np.array, tree)


def assert_close(one, other, rtol=1e-5, atol=1e-6):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol),
    one,
    other,
  )


def assert_equal(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture(scope="module")
def params():
  return on_host(init_state(MODEL, SGD, MESH, 0).params)


def test_rate_grows_linearly_then_falls_as_a_cosine_then_stays():
  rate = learning_rate(
    TrainConfig(
      learning_rate=2.0, warmup_steps=4, decay_steps=14, min_lr_ratio=0.1
    )
  )

  assert [rate(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
  assert rate(4) == 2.0
  assert rate(9) == pytest.approx(1.1)  # Half way: the mean of 2.0 and 0.2.
  assert rate(14) == pytest.approx(0.2)
  assert rate(1000) == pytest.approx(0.2)


def test_rate_is_the_same_on_the_host_and_in_a_jitted_step():
  rate = learning_rate(
    TrainConfig(warmup_steps=10, decay_steps=50, rewarm_steps=4)
  )
  steps = np.arange(60)

  jitted = jax.jit(jax.vmap(rate))(steps, jnp.full(60, 2))

  host = [rate(int(step), 2) for step in steps]
  np.testing.assert_allclose(jitted, host, rtol=1e-5)


def test_fresh_moments_late_in_a_run_are_warmed_up_again():
  cfg = TrainConfig(learning_rate=1.0, warmup_steps=10, decay_steps=10**6)
  cfg = dataclasses.replace(cfg, rewarm_steps=5)
  rate = learning_rate(cfg)

  late = [float(rate(20, age)) for age in range(6)]
  first = [float(rate(step, step)) for step in range(10)]

  np.testing.assert_allclose(late, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0], rtol=1e-6)
  np.testing.assert_allclose(first, [float(rate(step)) for step in range(10)])


def test_an_sgd_step_is_the_gradient_of_the_mean_over_tokens(params):
  step, batch = make_train_step(MODEL, SGD, MESH), make_batch()

  state, metrics = step(state_from_params(params, SGD, MESH), batch)

  loss, grads = by_hand(params, batch)
  assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
  assert metrics["num_tokens"] == 20
  assert metrics["num_tokens"].dtype == np.int32
  assert metrics["grad_norm"] == pytest.approx(
    float(
      np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(grads)))
    ),
    rel=1e-5,
  )
  assert_close(
    state.params, jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
  )
  assert (int(state.step), int(state.schedule_step)) == (1, 1)


def test_adamw_steps_equal_optax_by_hand(params):
  cfg = TrainConfig(
    batch_size=4,
    seq_len=6,
    learning_rate=0.01,
    warmup_steps=3,
    decay_steps=6,
    weight_decay=0.3,
    clip_norm=0.5,
  )
  step = make_train_step(MODEL, cfg, MESH)
  state = state_from_params(params, cfg, MESH)
  rate = optax.join_schedules(
    [
      lambda n: 0.01 * (n + 1) / 3,
      optax.cosine_decay_schedule(0.01, 3, alpha=0.1),
    ],
    [3],
  )
  decayed = jax.tree.map(lambda x: x.ndim > 1, params)
  reference = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.3, mask=decayed),
  )
  theirs, moments = params, reference.init(params)
  for i in range(5):
    state, _ = step(state, make_batch(i))
    updates, moments = reference.update(
      by_hand(theirs, make_batch(i))[1], moments, theirs
    )
    theirs = optax.apply_updates(theirs, updates)

  assert_close(state.params, theirs, rtol=1e-3, atol=2e-5)


def test_rate_is_read_from_schedule_step_without_tracing_again(params):
  cfg = dataclasses.replace(SGD, learning_rate=0.1, decay_steps=100)
  traces = []

  class Counting(type(MODEL)):
    def __call__(self, tokens):
      traces.append(tokens.shape)
      return super().__call__(tokens)

  step = make_train_step(Counting(TINY), cfg, MESH)
  state = state_from_params(params, cfg, MESH)
  state, first = step(state, make_batch())
  traced = len(traces)

  before = on_host(state.params)
  state = state.replace(schedule_step=np.int32(50))
  state = state.replace(params=put(state.params, {"head": before["head"]}))
  state, second = step(state, place_batch(make_batch(), MESH))

  assert first["learning_rate"] == pytest.approx(0.1)
  assert second["learning_rate"] == pytest.approx(0.05)
  assert (int(state.step), int(state.schedule_step)) == (2, 51)
  moved = np.sqrt(
    sum(
      ((a - b) ** 2).sum()
      for a, b in zip(
        jax.tree.leaves(on_host(state.params)), jax.tree.leaves(before)
      )
    )
  )
  assert moved == pytest.approx(0.05 * float(second["grad_norm"]), rel=1e-3)
  assert len(traces) == traced


def test_clipping_bounds_the_step_and_reports_the_whole_norm(params):
  cfg = dataclasses.replace(SGD, clip_norm=0.01)
  step, batch = make_train_step(MODEL, cfg, MESH), make_batch()

  state, metrics = step(state_from_params(params, cfg, MESH), batch)

  assert metrics["grad_norm"] > 0.1
  moved = jax.tree.map(lambda a, b: a - b, on_host(state.params), params)
  norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(moved)))
  assert norm == pytest.approx(0.5 * 0.01, rel=1e-3)


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_parts_equal_one_big_batch(params, parts):
  cfg = dataclasses.replace(SGD, accumulate_steps=parts)
  batch = make_batch()
  batch["weights"][3] = 0  # With 4 parts, one has no token at all.

  whole, one = make_train_step(MODEL, SGD, MESH)(
    state_from_params(params, SGD, MESH), batch
  )
  split, other = make_train_step(MODEL, cfg, MESH)(
    state_from_params(params, cfg, MESH), batch
  )

  assert_close(split.params, whole.params)
  assert_close(other, one)


def test_a_batch_without_tokens_changes_nothing(params):
  step, batch = make_train_step(MODEL, SGD, MESH), make_batch()
  batch["weights"][:] = 0

  state, metrics = step(state_from_params(params, SGD, MESH), batch)

  assert_equal(state.params, params)
  assert (float(metrics["loss"]), int(metrics["num_tokens"])) == (0.0, 0)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_weight_decay_spares_norm_scales(scan_layers):
  model = make_model(dataclasses.replace(TINY, scan_layers=scan_layers))
  cfg = dataclasses.replace(SGD, weight_decay=0.1)
  batch = make_batch()
  batch["weights"][:] = 0
  state = init_state(model, cfg, MESH, 0)
  before = on_host(state.params)

  state, _ = make_train_step(model, cfg, MESH)(state, batch)

  for path, leaf in jax.tree_util.tree_flatten_with_path(before)[0]:
    after = state.params
    for key in path:
      after = after[key.key]
    kept = 1.0 if path[-1].key == "scale" else 1 - 0.5 * 0.1
    np.testing.assert_allclose(after, leaf * kept, rtol=1e-5, atol=1e-8)


def test_the_state_is_consumed_and_runs_are_deterministic(params):
  cfg = dataclasses.replace(TrainConfig(), batch_size=4, seq_len=6)
  step = make_train_step(MODEL, cfg, MESH)
  results = []

  for _ in range(2):
    state = state_from_params(params, cfg, MESH)
    for i in range(3):
      old = state
      state, _ = step(state, make_batch(i))
      assert all(x.is_deleted() for x in jax.tree.leaves(old.params))
    results.append(on_host(state))

  assert_equal(*results)


def test_bfloat16_parameters_keep_float32_moments():
  model = make_model(
    dataclasses.replace(TINY, param_dtype="bfloat16", compute_dtype="bfloat16")
  )
  cfg = TrainConfig(batch_size=4, seq_len=6, learning_rate=0.05)
  state = init_state(model, cfg, MESH, 0)
  step, losses = make_train_step(model, cfg, MESH), []

  for _ in range(20):
    state, metrics = step(state, make_batch())
    losses.append(float(metrics["loss"]))

  assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
  assert {x.dtype.name for x in jax.tree.leaves(state.opt_state) if x.ndim} == {
    "float32"
  }
  assert losses[-1] < 0.8 * losses[0]


def test_a_state_from_params_shares_no_memory_with_them(params):
  mine = jax.tree.map(np.copy, params)

  state = state_from_params(mine, SGD, MESH, step=7)
  jax.tree.map(lambda x: x.fill(np.nan), mine)

  assert_equal(state.params, params)
  assert (int(state.step), int(state.schedule_step)) == (7, 7)


def test_the_abstract_state_is_the_real_one_without_arrays():
  cfg = TrainConfig(batch_size=4, seq_len=6)

  abstract = abstract_state(MODEL, cfg, MESH)

  state = init_state(MODEL, cfg, MESH, 0)
  assert jax.tree.structure(abstract) == jax.tree.structure(state)
  jax.tree.map(lambda a, x: _same(a, x), abstract, state)


def _same(a, x):
  assert (a.shape, a.dtype) == (x.shape, x.dtype)
  assert a.sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"learning_rate": 0.0}, ["learning_rate is 0.0", "above 0"]),
    ({"optimizer": "adam"}, ["'adam'", "adamw", "sgd"]),
    ({"accumulate_steps": 3}, ["accumulate_steps is 3", "batch_size (8)"]),
    ({"decay_steps": 10}, ["decay_steps is 10", "warmup_steps (50)"]),
    ({"b2": 1.0}, ["b2 is 1.0", "[0, 1)"]),
    ({"min_lr_ratio": 2.0}, ["min_lr_ratio is 2.0", "[0, 1]"]),
  ],
)
def test_a_bad_setting_is_refused_with_its_rule(change, words):
  with pytest.raises(ValueError) as error:
    TrainConfig(**change)

  for word in words:
    assert word in str(error.value)
