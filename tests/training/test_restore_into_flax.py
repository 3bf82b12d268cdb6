"""The example that loads a run without our trainer."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

from ddiloco_jax.models.transformer import ModelConfig, init_params, make_model
from ddiloco_jax.training.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "restore_into_flax.py"


def test_the_example_samples_text_from_a_checkpoint(tmp_path):
  cfg = ModelConfig(
    embed_dim=8, num_layers=1, head_dim=2, mlp_dim=8, tie_embeddings=True
  )
  params = init_params(make_model(cfg), 0)
  # A model that repeats its input: residual stream only, sharp logits.
  params["layers_0"]["attention"]["output"] *= 0
  params["layers_0"]["mlp"]["down"] *= 0
  params["final_norm"]["scale"] += 1e4
  (tmp_path / "config.json").write_text(
    json.dumps({"model": dataclasses.asdict(cfg)})
  )
  with Checkpoints(tmp_path / "checkpoints") as saved:
    saved.save(9, {"params": {**params, "embedding": params["embedding"] * 0}})
    saved.save(10, {"params": params})

  done = subprocess.run(
    [sys.executable, EXAMPLE, tmp_path, "wx"],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )

  assert done.returncode == 0, done.stderr
  assert done.stdout == "w" + 255 * "x" + "\n"


def test_the_example_is_short_and_needs_flax_and_orbax_only():
  lines = EXAMPLE.read_text().splitlines()

  assert len(lines) < 40
  modules = {
    line.split()[1].split(".")[0]
    for line in lines
    if line.startswith(("import ", "from "))
  }
  allowed = {"json", "pathlib", "sys", "jax", "flax", "orbax", "ddiloco_jax"}
  assert modules <= allowed
