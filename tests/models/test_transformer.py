"""The model against a float64 forward pass written apart, in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco_jax.models.transformer import (
  ModelConfig,
  init_params,
  make_model,
  num_params,
  rotate,
)

TINY = ModelConfig(
  vocab_size=31,
  embed_dim=16,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  mlp_dim=20,
)


def tokens(rows=2, length=9, seed=0):
  return np.random.default_rng(seed).integers(
    0, TINY.vocab_size, (rows, length), dtype=np.int32
  )


def logits(cfg, params, inputs):
  return np.asarray(jax.jit(make_model(cfg).apply)({"params": params}, inputs))


def shaken(params, seed=1):
  """No scale stays 1, so that each array matters."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: np.asarray(
      x + 0.1 * rng.standard_normal(x.shape), dtype=np.float32
    ),
    params,
  )


def paths(params):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): x
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]
  }


def numpy_logits(cfg, params, inputs):
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

  def norm(x, scale):
    rms = np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps)
    return x / rms * scale

  def turn(vector, t):
    half = cfg.head_dim // 2
    out = vector.copy()
    for i in range(half):
      angle = t * cfg.rope_theta ** (-2 * i / cfg.head_dim)
      rotation = np.exp(1j * angle) * (vector[i] + 1j * vector[i + half])
      out[i], out[i + half] = rotation.real, rotation.imag
    return out

  def attend(x, p):
    out = np.zeros_like(x)
    for n in range(cfg.num_heads):
      group = n // (cfg.num_heads // cfg.num_kv_heads)
      keys = [turn(v @ p["key"][:, group], s) for s, v in enumerate(x)]
      values = x @ p["value"][:, group]
      for t in range(len(x)):
        query = turn(x[t] @ p["query"][:, n], t)
        score = np.array([query @ k for k in keys[: t + 1]])
        share = np.exp(score / np.sqrt(cfg.head_dim))
        mixed = (share / share.sum()) @ values[: t + 1]
        out[t] += mixed @ p["output"][n]
    return out

  def feed(x, p):
    gate = x @ p["gate"]
    return (gate / (1 + np.exp(-gate)) * (x @ p["up"])) @ p["down"]

  result = []
  for row in inputs:
    x = params["embedding"][row]
    for i in range(cfg.num_layers):
      p = params[f"layers_{i}"]
      x = x + attend(norm(x, p["attention_norm"]["scale"]), p["attention"])
      x = x + feed(norm(x, p["mlp_norm"]["scale"]), p["mlp"])
    head = params["embedding"].T if cfg.tie_embeddings else params["head"]
    result.append(norm(x, params["final_norm"]["scale"]) @ head)
  return np.array(result)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_logits_equal_a_numpy_forward_pass(tied, num_kv_heads):
  cfg = dataclasses.replace(
    TINY, tie_embeddings=tied, num_kv_heads=num_kv_heads
  )
  params = shaken(init_params(make_model(cfg), 0))

  found = logits(cfg, params, tokens(length=7))

  np.testing.assert_allclose(
    found, numpy_logits(cfg, params, tokens(length=7)), rtol=2e-4, atol=2e-5
  )


def test_tied_head_is_the_transposed_embedding():
  tied = dataclasses.replace(TINY, tie_embeddings=True)
  params = shaken(init_params(make_model(tied), 0))
  assert "head" not in params

  untied = logits(TINY, {**params, "head": params["embedding"].T}, tokens())

  np.testing.assert_allclose(
    logits(tied, params, tokens()), untied, rtol=1e-5, atol=1e-6
  )


def test_rope_scores_depend_on_distance_only():
  rng = np.random.default_rng(0)
  q, k = rng.standard_normal((2, 8)).astype(np.float32)
  length = 12
  turned_q = np.asarray(rotate(jnp.tile(q, (1, length, 1, 1)), 100.0))[0, :, 0]
  turned_k = np.asarray(rotate(jnp.tile(k, (1, length, 1, 1)), 100.0))[0, :, 0]

  scores = turned_q @ turned_k.T

  for distance in range(length):
    along = np.diagonal(scores, -distance)
    np.testing.assert_allclose(along, along[0], rtol=1e-4, atol=1e-5)
  assert np.ptp(scores[:, 0]) > 0.1
  np.testing.assert_array_equal(turned_q[0], q)


def test_past_logits_do_not_see_future_tokens():
  params = init_params(make_model(TINY), 0)
  before = tokens()
  after = before.copy()
  after[:, 5:] = (after[:, 5:] + 1) % TINY.vocab_size

  one, other = logits(TINY, params, before), logits(TINY, params, after)

  np.testing.assert_array_equal(one[:, :5], other[:, :5])
  assert np.abs(one[:, 5:] - other[:, 5:]).max() > 0


def test_scanned_layers_equal_unrolled_ones():
  scanned = dataclasses.replace(TINY, scan_layers=True)
  params = init_params(make_model(TINY), 0)
  layers = [params[f"layers_{i}"] for i in range(TINY.num_layers)]
  stacked = {k: v for k, v in params.items() if not k.startswith("layers_")}
  stacked["layers"] = jax.tree.map(lambda *xs: np.stack(xs), *layers)
  jax.tree.map(
    np.testing.assert_array_equal, stacked, init_params(make_model(scanned), 0)
  )

  found = logits(scanned, stacked, tokens())

  np.testing.assert_allclose(
    found, logits(TINY, params, tokens()), rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize("scan_layers", [False, True])
def test_remat_changes_neither_loss_nor_gradient(scan_layers):
  plain = dataclasses.replace(TINY, scan_layers=scan_layers)
  saving = dataclasses.replace(plain, remat=True)
  params = init_params(make_model(plain), 0)

  def loss(cfg):
    return jax.jit(
      jax.value_and_grad(
        lambda p: jnp.var(make_model(cfg).apply({"params": p}, tokens()))
      )
    )(params)

  (one, one_grad), (other, other_grad) = loss(plain), loss(saving)

  np.testing.assert_allclose(one, other, rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-9),
    one_grad,
    other_grad,
  )
  assert "remat" in str(
    jax.make_jaxpr(lambda p: make_model(saving).apply({"params": p}, tokens()))(
      params
    )
  )


@pytest.mark.parametrize(
  "change",
  [
    {},
    {"tie_embeddings": True},
    {"scan_layers": True},
    {"num_kv_heads": 1},
  ],
)
def test_num_params_counts_what_init_makes(change):
  cfg = dataclasses.replace(TINY, **change)

  params = init_params(make_model(cfg), 0)

  assert num_params(cfg) == sum(x.size for x in jax.tree.leaves(params))


def test_paths_are_the_published_ones():
  found = paths(init_params(make_model(TINY), 0))

  block = {
    "attention/key",
    "attention/output",
    "attention/query",
    "attention/value",
    "attention_norm/scale",
    "mlp/down",
    "mlp/gate",
    "mlp/up",
    "mlp_norm/scale",
  }
  assert set(found) == {
    "embedding",
    "final_norm/scale",
    "head",
    *(f"layers_{i}/{path}" for i in range(3) for path in block),
  }
  assert len(found) >= 24, "three layers must fill the paper's 24 fragments"


def test_params_are_plain_dicts_of_the_param_dtype():
  cfg = dataclasses.replace(TINY, param_dtype="bfloat16")

  params = init_params(make_model(cfg), 0)

  assert type(params) is dict
  assert type(params["layers_0"]["attention"]) is dict
  assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}


def test_bfloat16_compute_is_close_and_gives_float32_logits():
  cfg = dataclasses.replace(TINY, compute_dtype="bfloat16")
  params = shaken(init_params(make_model(TINY), 0))

  found, exact = logits(cfg, params, tokens()), logits(TINY, params, tokens())

  assert found.dtype == np.float32
  assert 0 < np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


def test_a_fresh_model_knows_nothing_yet():
  params = init_params(make_model(TINY), 0)
  exact = logits(TINY, params, tokens()).astype(np.float64)

  nats = np.log(np.exp(exact).sum(-1)) - exact[..., 0]

  assert abs(nats.mean() - np.log(TINY.vocab_size)) < 0.1


def test_init_is_a_function_of_the_seed():
  def drawn(seed):
    return paths(init_params(make_model(TINY), seed))

  one, again, other = drawn(0), drawn(0), drawn(1)

  for path in one:
    np.testing.assert_array_equal(one[path], again[path])
    if not path.endswith("scale"):
      assert np.abs(one[path] - other[path]).max() > 0
  first, second = "layers_0/mlp/gate", "layers_1/mlp/gate"
  assert np.abs(one[first] - one[second]).max() > 0


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"num_kv_heads": 3}, ["num_kv_heads is 3", "divide", "num_heads (4)"]),
    ({"head_dim": 7}, ["head_dim is 7", "even", "8"]),
    ({"num_layers": 0}, ["num_layers is 0", "at least 1"]),
    ({"compute_dtype": "float16"}, ["'float16'", "bfloat16"]),
    ({"norm_eps": 0.0}, ["norm_eps is 0.0", "above 0"]),
  ],
)
def test_a_bad_shape_is_refused_with_its_rule(change, words):
  with pytest.raises(ValueError) as error:
    dataclasses.replace(TINY, **change)

  for word in words:
    assert word in str(error.value)
