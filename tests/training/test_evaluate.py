"""Held-out loss: a mean over tokens, whatever the batches are."""

import jax
import numpy as np
import pytest

from ddiloco_jax.models.transformer import ModelConfig, init_params, make_model
from ddiloco_jax.training.evaluate import EvaluateConfig, make_evaluate
from ddiloco_jax.training.mesh import MeshConfig, make_mesh

CFG = ModelConfig(
  vocab_size=11, embed_dim=8, num_layers=1, num_heads=2, head_dim=4, mlp_dim=8
)
MODEL = make_model(CFG)


def make_batch(rows, weights):
  rng = np.random.default_rng(rows)
  tokens = rng.integers(0, 11, (rows, 6), dtype=np.int32)
  return {
    "inputs": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "weights": np.broadcast_to(weights, (rows, 5)).astype(np.float32),
  }


def nats_by_hand(params, batch):
  logits = np.asarray(MODEL.apply({"params": params}, batch["inputs"]))
  share = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  true = np.take_along_axis(share, batch["targets"][..., None], -1)[..., 0]
  return -np.log(true)


def test_the_mean_is_over_tokens_not_batches():
  params = jax.tree.map(lambda x: 3 * x, init_params(MODEL, 0))
  batches = [make_batch(4, 1), make_batch(2, [1, 1, 0, 0, 0])]

  result = make_evaluate(MODEL)(params, batches)

  nats = [nats_by_hand(params, batch) for batch in batches]
  expected = (nats[0].sum() + nats[1][:, :2].sum()) / 24
  assert result.num_tokens == 24
  assert result.loss == pytest.approx(expected, rel=1e-5)


def test_host_arrays_and_a_mesh_give_the_same():
  params = init_params(MODEL, 0)
  mesh = make_mesh(MeshConfig())

  on_mesh = make_evaluate(MODEL, mesh)(params, [make_batch(3, 1)])
  on_host = make_evaluate(MODEL)(
    jax.tree.map(np.asarray, params), [make_batch(3, 1)]
  )

  assert on_mesh.loss == pytest.approx(on_host.loss, rel=1e-6)


def test_no_held_out_token_is_an_error():
  params = init_params(MODEL, 0)

  with pytest.raises(ValueError, match=r"evaluate\.num_windows"):
    make_evaluate(MODEL)(params, [make_batch(2, 0)])


def test_settings_that_evaluate_nothing_are_refused():
  with pytest.raises(ValueError, match="num_windows is 0"):
    EvaluateConfig(num_windows=0)
  with pytest.raises(ValueError, match="every_steps is -1"):
    EvaluateConfig(every_steps=-1)
