"""A learner on four devices trains, in a real run, as one on a single device."""

import math

import numpy as np
import pytest

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments
from ddiloco_jax.data import stream
from ddiloco_jax.launch import syncing
from ddiloco_jax.models import transformer
from ddiloco_jax.training import evaluate
from ddiloco_jax.training.checkpoint import Checkpoints
from tests.support import small
from tests.support.over_grpc import served_run, strict_lines
from tests.support.processes import TRAIN, ending, module, overrides

FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
MESHES = {
  "one device": {},
  "data 2, fsdp 2": {"mesh__data": 2, "mesh__fsdp": 2},
  "fsdp 2, tensor 2": {"mesh__fsdp": 2, "mesh__tensor": 2},
}
NUM_STEPS = 48


def settings():
  """One learner that waits for each publication: the same on every machine."""
  cfg = small.get_config()
  cfg.sync.num_syncer_steps = NUM_STEPS
  cfg.sync.wait_for_publication = True
  cfg.sync.max_open_rounds = 4
  cfg.wire.up_format = "float32"
  return config.freeze(cfg)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sharded_learners_reach_the_loss_of_one_device(tmp_path):
  cfg = settings()
  theta = syncing.init_params(cfg)
  reached, params, losses = {}, {}, {}
  for number, (name, sizes) in enumerate(MESHES.items()):
    run_dir = tmp_path / str(number)
    with (
      served_run(cfg, run_dir, theta=theta) as run,
      ending() as start,
    ):
      learner = start(
        module(
          TRAIN,
          "--config=tests/support/small.py",
          f"--run_dir={run_dir}",
          f"--syncer={run.address}",
          *overrides(run__lr_index="own", **sizes),
        ),
        run_dir / "learner.log",
        XLA_FLAGS=FOUR_DEVICES if sizes else "",
      )
      code = learner.wait(180.0)
      finished = run.wait(30.0)
      versions = [f.version.n for f in run.status().fragments]
    assert code == 0, learner.said()
    assert finished.missing == ()
    # Fragment 0 has its slot at the last step; the others have a flush.
    assert versions == [6, 7, 7, 7]
    params[name] = final_params(run_dir)
    reached[name] = held_out_loss(cfg, params[name])
    losses[name] = training_losses(run_dir)

  one = reached["one device"]
  assert one < held_out_loss(cfg, theta) - 0.05
  for name in MESHES:
    assert reached[name] == pytest.approx(one, abs=1e-3), reached
    np.testing.assert_allclose(
      losses[name], losses["one device"], rtol=0, atol=2e-3
    )
    for path, array in params[name].items():
      moved = np.abs(params["one device"][path] - theta[path]).max()
      worst = np.abs(array - params["one device"][path]).max()
      assert worst < 0.05 * moved, (name, path)


def final_params(run_dir):
  with Checkpoints(run_dir / "checkpoints", read_only=True) as saved:
    return fragments.flatten(saved.restore(saved.latest())["params"])


def held_out_loss(cfg, params):
  loss_of = evaluate.make_evaluate(transformer.make_model(cfg.model))
  windows = stream.held_out(cfg.data, cfg.train.seq_len, 16, 4)
  return loss_of(fragments.unflatten(params), windows).loss


def training_losses(run_dir):
  lines = strict_lines(run_dir / "learners" / "0" / "metrics.jsonl")
  found = {line["step"]: line["loss"] for line in lines if "loss" in line}
  assert len(found) >= NUM_STEPS - 2
  assert all(map(math.isfinite, found.values()))
  return [found[step] for step in range(1, NUM_STEPS - 1)]
