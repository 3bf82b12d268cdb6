"""Held-out loss of a run's first and last global parameters.

As a program, `python -m ddiloco_jax.launch.held_out RUN_DIR`, it prints them as
a line of JSON. A second argument is the .npz with Theta 0 of a run of numpy
learners.
"""

import json
import logging
import math
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments
from ddiloco_jax.data import stream
from ddiloco_jax.launch import arrays, numpy_model, syncing
from ddiloco_jax.models import transformer
from ddiloco_jax.training import checkpoint, evaluate


def evaluate_run(
  run_dir: pathlib.Path, theta: pathlib.Path | None = None
) -> dict[str, float | None]:
  """Evaluates what the syncer has saved; nothing of the run may still write.

  Args:
    run_dir: Of a run of a model of ours, started from the config's own seed.
    theta: Theta 0 of `launch/numpy_model.py`, if the run is one of that.

  Returns:
    loss_start and loss_end, nats per token over the run's held-out windows
    (None if it is not finite, or the run saved nothing; no loss_start for a run
    that began from a snapshot), and bigram_entropy of that text.
  """
  cfg = config.from_json((run_dir / "config.json").read_text("utf-8"))
  windows = stream.held_out(
    cfg.data, cfg.train.seq_len, cfg.evaluate.num_windows, cfg.train.batch_size
  )
  loss_of, flat = _model_of(cfg, theta)
  first = fragments.unflatten(flat)
  last, began_from = _saved(run_dir, first)
  losses = {
    "loss_start": None if began_from else loss_of(first, windows),
    "loss_end": None if last is None else loss_of(last, windows),
    "bigram_entropy": stream.bigram_entropy(cfg.data),
  }
  return {
    name: None if loss is None or not math.isfinite(loss) else loss
    for name, loss in losses.items()
  }


def _model_of(
  cfg: config.Config, theta: pathlib.Path | None
) -> tuple[Callable[[Any, Any], float], Mapping[str, Any]]:
  """(parameters, windows) -> loss, and Theta 0 by tree path."""
  if theta is None:
    loss_of = evaluate.make_evaluate(transformer.make_model(cfg.model))
    return lambda params, on: loss_of(params, on).loss, syncing.init_params(cfg)

  def numpy_loss(params: Any, on: Any) -> float:
    flat = fragments.flatten(jax.device_get(params))
    return numpy_model.loss(flat, on)

  return numpy_loss, arrays.load_arrays(str(theta))


def _saved(run_dir: pathlib.Path, like: dict) -> tuple[dict | None, str]:
  """(params of the newest checkpoint, of like's structure; the run that this
  one began from a snapshot of, or "")."""
  saved = checkpoint.Checkpoints(run_dir / "checkpoints", read_only=True)
  step = saved.latest()
  if step is None:
    return None, ""
  trees = saved.restore(step, {"params": jax.tree.map(lambda x: x, like)})
  origin, _ = saved.records(step)["spec"].get("origin", ("", 0))
  return trees["params"], origin


if __name__ == "__main__":
  # Orbax remarks on what was asked of it: to read only.
  logging.getLogger("absl").setLevel(logging.ERROR)
  losses = evaluate_run(*map(pathlib.Path, sys.argv[1:]))
  print(json.dumps(losses, allow_nan=False))
