"""Run by test_mesh.py with eight forced host devices; asserts, prints names."""

import dataclasses
import sys

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ddiloco_jax.models.transformer import ModelConfig, make_model
from ddiloco_jax.training.checkpoint import Checkpoints
from ddiloco_jax.training.evaluate import make_evaluate
from ddiloco_jax.training.mesh import MeshConfig, make_mesh, shardings
from ddiloco_jax.training.parts import put, take
from ddiloco_jax.training.step import (
  TrainConfig,
  abstract_state,
  init_state,
  make_train_step,
)

TINY = ModelConfig(
  vocab_size=16,
  embed_dim=16,
  num_layers=1,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  mlp_dim=24,
)
CFG = TrainConfig(batch_size=8, seq_len=6, warmup_steps=2, accumulate_steps=2)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 16, (8, 7), dtype=np.int32)
BATCH = {
  "inputs": TOKENS[:, :-1],
  "targets": TOKENS[:, 1:],
  "weights": (RNG.random((8, 6)) < 0.8).astype(np.float32),
}


def train(model, mesh, num_steps=4):
  state = init_state(model, CFG, mesh, 0)
  first = jax.tree.map(np.array, state.params)
  step, losses = make_train_step(model, CFG, mesh), []
  for _ in range(num_steps):
    state, metrics = step(state, BATCH)
    losses.append(float(metrics["loss"]))
  return first, state, losses


def check_training(meshes, **change):
  model = make_model(dataclasses.replace(TINY, **change))
  first, lone, losses = train(model, make_mesh(MeshConfig()))
  assert losses[-1] < losses[0]
  held_out = make_evaluate(model)(lone.params, [BATCH])
  for sizes in meshes:
    mesh = make_mesh(MeshConfig(**sizes))
    same_first, state, same_losses = train(model, mesh)
    jax.tree.map(np.testing.assert_array_equal, same_first, first)
    np.testing.assert_allclose(same_losses, losses, rtol=1e-5)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
      state.params,
      lone.params,
    )
    found = make_evaluate(model, mesh)(state.params, [BATCH])
    np.testing.assert_allclose(found.loss, held_out.loss, rtol=1e-5)
  return state


def check_places(state):
  gate = state.params["layers_0"]["mlp"]["gate"]
  moment = state.opt_state[0].mu["layers_0"]["mlp"]["gate"]
  assert gate.sharding.spec == P("fsdp", "tensor")
  assert moment.sharding.is_equivalent_to(gate.sharding, 2)
  assert gate.addressable_shards[0].data.shape == (8, 12)
  scale = state.params["final_norm"]["scale"]
  assert scale.sharding.is_fully_replicated

  copies = take(state.params, ["layers_0/mlp/gate"])
  copy = copies["layers_0/mlp/gate"]
  assert copy.sharding.is_equivalent_to(gate.sharding, 2)
  fresh = put(state.params, {"layers_0/mlp/gate": np.asarray(copy) + 1})
  new = fresh["layers_0"]["mlp"]["gate"]
  assert new.sharding.is_equivalent_to(gate.sharding, 2)
  np.testing.assert_array_equal(new, np.asarray(gate) + 1)


def check_restore(directory):
  model = make_model(TINY)
  saver = make_mesh(MeshConfig(fsdp=4, tensor=2))
  state = init_state(model, CFG, saver, 3)
  state, _ = make_train_step(model, CFG, saver)(state, BATCH)
  with Checkpoints(directory) as saved:
    saved.save(1, {"state": state, "params": state.params})
    saved.wait()
    for sizes in ({}, {"data": 2}, {"fsdp": 2, "tensor": 2}):
      mesh = make_mesh(MeshConfig(**sizes))
      like = abstract_state(model, CFG, mesh)
      found = saved.restore(1, {"state": like})["state"]
      assert jax.tree.structure(found) == jax.tree.structure(state)
      jax.tree.map(np.testing.assert_array_equal, found, state)
      jax.tree.map(lambda x, s: _lies(x, s), found, shardings(like, mesh))
    host = saved.restore(1)["params"]
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(host))
    jax.tree.map(np.testing.assert_array_equal, host, state.params)


def _lies(x, sharding):
  assert x.sharding.is_equivalent_to(sharding, x.ndim)


if __name__ == "__main__":
  assert len(jax.devices()) == 8
  split = {"fsdp": 2, "tensor": 2}
  check_places(check_training([{"data": 2, "fsdp": 2}, split]))
  check_training([split], scan_layers=True, remat=True, tie_embeddings=True)
  check_restore(sys.argv[1])
  print("all checks passed")
