"""Assembles a training process from a config: a learner, or plain training.

With a syncer, the model and everything that must agree come from the run; the
mesh, the batch and the inner optimizer are this process's own.
"""

import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments
from ddiloco_jax.data import stream
from ddiloco_jax.learner.learner import Batches, Learner, LearnerConfig
from ddiloco_jax.models import transformer
from ddiloco_jax.training import evaluate, mesh, metrics, trainer
from ddiloco_jax.training.checkpoint import Checkpoints
from ddiloco_jax.wire import port as ports

_log = logging.getLogger(__name__)
ShouldStop = Callable[[], bool]


def run_learner(
  cfg: config.Config,
  port: ports.Port,
  directory: pathlib.Path,
  should_stop: ShouldStop,
  restore: bool = False,
) -> str:
  """Trains as one learner of a run until the run ends.

  Args:
    cfg: The learner's own settings; the run's replace what must agree.
    port: Not started yet.
    directory: For this learner's metrics and checkpoints.
    should_stop: Asked at every step boundary.
    restore: Take the inner optimizer's moments from the newest checkpoint.

  Returns:
    Why it ended.

  Raises:
    ValueError: the run's layout is not that of the run's own model here, or
      settings that cannot be met.
  """
  cfg, replaced = config.with_shared(cfg, port.run.settings_json)
  if replaced:
    _log.info("the syncer's settings rule for %s", ", ".join(replaced))
  config.check_vocab(cfg)
  model = _make_trainer(cfg, seed=None)
  check_layout(port.run.layout, model.params)
  make_batches = batches_of(cfg, port.run.num_shards)
  if example := make_batches(0)(0):
    model.warm_up(example)  # Compiles before it joins (App. E).
  with (
    Checkpoints(directory / "checkpoints", cfg.run.max_to_keep) as saved,
    metrics.MetricsWriter(directory / "metrics.jsonl") as records,
  ):
    records.write({"data_digest": stream.load_corpus(cfg.data).digest})
    latest = saved.latest()
    if restore and latest is not None:
      model.restore_moments(saved, latest)
    learner = Learner(
      port,
      model,
      make_batches,
      LearnerConfig(lr_index=cfg.run.lr_index),
      _at_boundary(cfg, model, saved, records, latest or 0),
    )
    return learner.train(should_stop)


def run_plain(
  cfg: config.Config,
  directory: pathlib.Path,
  should_stop: ShouldStop,
  restore: bool = False,
) -> float:
  """Trains without a syncer: the ordinary loop, shard 0 of 1.

  Returns:
    The held-out loss at the end, nats per token.
  """
  config.check_vocab(cfg)
  model = _make_trainer(cfg, cfg.run.seed)
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "config.json").write_text(config.to_json(cfg))
  make_evaluate = evaluate.make_evaluate(
    transformer.make_model(cfg.model), model.mesh
  )
  held_out = stream.held_out(
    cfg.data, cfg.train.seq_len, cfg.evaluate.num_windows, cfg.train.batch_size
  )
  with (
    Checkpoints(directory / "checkpoints", cfg.run.max_to_keep) as saved,
    metrics.MetricsWriter(directory / "metrics.jsonl") as records,
  ):
    latest = saved.latest()
    start = 0
    if restore and latest is not None:
      start = model.restore(saved, latest)["step"]
    boundary = _at_boundary(cfg, model, saved, records, latest or 0)

    def held_out_loss(step: int) -> float:
      loss = make_evaluate(model.params, held_out).loss
      records.write({"step": step, "held_out_loss": loss})
      _log.info("step %d: held-out loss %.4f", step, loss)
      return loss

    def at_boundary(step: int, record: trainer.Record) -> bool:
      boundary(step, record, {"step": step})
      every = cfg.evaluate.every_steps
      if every and step % every == 0 and step < cfg.run.num_steps:
        held_out_loss(step)
      return should_stop()

    steps = trainer.train(
      model,
      batches_of(cfg, 1)(0),
      cfg.run.num_steps,
      at_boundary,
      start,
    )
    if saved.latest() != steps:
      model.save(saved, steps, {"step": steps})
    return held_out_loss(steps)


def batches_of(cfg: config.Config, num_shards: int) -> Callable[[int], Batches]:
  """Shard -> (position -> batch, or None once the data is used up)."""

  def make(shard: int):
    batches = stream.make_batches(
      cfg.data,
      cfg.run.seed,
      shard,
      num_shards,
      cfg.train.batch_size,
      cfg.train.seq_len,
    )

    def batch(position: int) -> Mapping[str, np.ndarray] | None:
      try:
        return batches(position)
      except stream.Exhausted:
        return None

    return batch

  return make


def check_layout(layout: fragments.Layout, params: Mapping[str, Any]) -> None:
  """Refuses a run whose parameters are not this model's.

  Raises:
    ValueError: names the first path that differs, with both sides.
  """
  ours = fragments.shapes_of(fragments.flatten(params))
  theirs = {leaf.path: (leaf.shape, leaf.dtype) for leaf in layout.leaves}
  for path in sorted(ours.keys() | theirs.keys()):
    mine, run = ours.get(path), theirs.get(path)
    if mine is None or run is None or tuple(mine[0]) != tuple(run[0]):
      raise ValueError(
        f"the run's layout and this model differ first at {path!r}: the run"
        f" has {run}, this model {mine} (shape, dtype). Both sides must have"
        " the same model section; use the syncer's config."
      )


def _make_trainer(cfg: config.Config, seed: int | None) -> trainer.Trainer:
  return trainer.Trainer(
    transformer.make_model(cfg.model),
    cfg.train,
    mesh.make_mesh(cfg.mesh),
    seed,
  )


def _at_boundary(
  cfg: config.Config,
  model: trainer.Trainer,
  saved: Checkpoints,
  records: metrics.MetricsWriter,
  offset: int,
) -> Callable[..., None]:
  """Writes records and checkpoints; steps of a checkpoint go on from offset."""

  def at_boundary(step: int, record: trainer.Record, progress: Any) -> None:
    if record and record["step"] % cfg.run.log_every_steps == 0:
      records.write(record)
    every = cfg.run.checkpoint_every_steps
    if every and step % every == 0:
      model.save(saved, offset + step, progress)

  return at_boundary
