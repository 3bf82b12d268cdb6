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
from ddiloco_jax.launch import cuts, exits
from ddiloco_jax.launch.diary import Diary
from ddiloco_jax.learner.learner import Learner, LearnerConfig
from ddiloco_jax.learner.patience import SyncerLost
from ddiloco_jax.learner.recovery import Recovery
from ddiloco_jax.learner.seams import Batches
from ddiloco_jax.models import transformer
from ddiloco_jax.syncer.errors import InUse
from ddiloco_jax.training import evaluate, mesh, metrics, trainer
from ddiloco_jax.training.checkpoint import Checkpoints
from ddiloco_jax.wire import port as ports
from ddiloco_jax.wire.status import ServiceError

_log = logging.getLogger(__name__)
ShouldStop = Callable[[], bool]


def run_learner(
  cfg: config.Config,
  port: ports.Port,
  directory: pathlib.Path,
  should_stop: ShouldStop,
  *,
  restore: bool = False,
  recovery: Recovery | None = None,
  snapshot: pathlib.Path | None = None,
) -> str:
  """Trains as one learner of a run until the run ends.

  Args:
    cfg: The learner's own settings; the run's replace what must agree.
    port: Not started yet.
    directory: For this learner's metrics and checkpoints.
    should_stop: Asked at every step boundary.
    restore: Take the inner optimizer's moments from the newest checkpoint,
      where no peer gives its own.
    recovery: From peers and for peers; None for neither.
    snapshot: A cut, whose part of this learner it goes on from, unless it is to
      take a newer checkpoint.

  Returns:
    Why it ended.

  Raises:
    BadUsage: the run's layout is not that of the run's own model here, or
      settings that cannot be met, or a directory that cannot be written to.
  """
  with exits.edge(), exits.writing_to(directory):
    cfg, model = _of_run(cfg, port.run)
    make_batches = batches_of(cfg, port.run.num_shards)
    example = make_batches(0)(0)
    records = metrics.MetricsWriter(directory / "metrics.jsonl")
  if example:
    model.warm_up(example)  # Compiles before it joins (App. E).
  with (
    records,
    Checkpoints(directory / "checkpoints", cfg.run.max_to_keep) as saved,
  ):
    records.write({"data_digest": stream.load_corpus(cfg.data).digest})
    latest = saved.latest()
    with exits.edge():
      if restore and latest is not None:
        model.restore_moments(saved, latest)
        own, part = "checkpoint", None
      else:
        part = snapshot and cuts.restore(
          snapshot, directory.name, port.run, model
        )
        own = "snapshot" if part else "fresh"
    if recovery:
      recovery.own = own
    boundaries = _Boundaries(cfg, model, saved, records, latest or 0)
    diary = Diary(
      cfg, model, port.run, directory / "steps", resumes=part is not None
    )
    kept = cuts.Cuts(directory, model)
    learner = Learner(
      port,
      model,
      make_batches,
      _loop_config(cfg.run),
      boundaries,
      recovery,
      diary.note,
      kept.save,
      part,
    )
    try:
      reason = learner.train(should_stop)
    except (SyncerLost, ServiceError) as error:
      if not (isinstance(error, ServiceError) and error.code == "ABORTED"):
        boundaries.save()  # Fenced, the directory is another process's.
      raise
    finally:
      kept.close()
    boundaries.save()
    diary.close()
    return reason


def _of_run(
  cfg: config.Config, run: ports.RunSpec
) -> tuple[config.Config, trainer.Trainer]:
  """The settings and the model that a run asks of its learners."""
  cfg, replaced = config.with_shared(cfg, run.settings_json)
  if replaced:
    _log.info("the syncer's settings rule for %s", ", ".join(replaced))
  config.check_vocab(cfg)
  model = make_trainer(cfg, None, cfg.run.step_s)
  check_layout(run.layout, model.params)
  return cfg, model


def run_plain(
  cfg: config.Config,
  directory: pathlib.Path,
  should_stop: ShouldStop,
  *,
  restore: bool = False,
) -> float:
  """Trains without a syncer: the ordinary loop, shard 0 of 1.

  Returns:
    The held-out loss at the end, nats per token.

  Raises:
    BadUsage: settings that cannot be met, a directory that cannot be written
      to, or a checkpoint of another model.
    InUse: the directory holds a run and `restore` is not set, or the other way
      round.
  """
  with exits.edge(), exits.writing_to(directory):
    config.check_vocab(cfg)
    _check_directory(directory, restore=restore)
    model = make_trainer(cfg, cfg.run.seed, cfg.run.step_s)
    records = metrics.MetricsWriter(directory / "metrics.jsonl")
    (directory / "config.json").write_text(config.to_json(cfg))
    held_out = stream.held_out(
      cfg.data,
      cfg.train.seq_len,
      cfg.evaluate.num_windows,
      cfg.train.batch_size,
    )
  make_evaluate = evaluate.make_evaluate(
    transformer.make_model(cfg.model), model.mesh
  )
  with (
    records,
    Checkpoints(directory / "checkpoints", cfg.run.max_to_keep) as saved,
  ):
    latest = saved.latest()
    start, offset = 0, latest or 0
    if restore and latest is not None:
      with exits.edge():
        start, offset = model.restore(saved, latest)["step"], 0
    boundaries = _Boundaries(cfg, model, saved, records, offset)

    def held_out_loss(step: int) -> float:
      loss = make_evaluate(model.params, held_out).loss
      records.write({"step": step, "held_out_loss": loss})
      _log.info("step %d: held-out loss %.4f", step, loss)
      return loss

    def at_boundary(step: int, record: trainer.Record) -> bool:
      boundaries(step, record, {"step": step})
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
    last = dict(model.last())
    last.pop("step_s", None)  # A wait for a step that was under way.
    boundaries.note(last)
    boundaries.save()
    return held_out_loss(steps)


def batches_of(cfg: config.Config, num_shards: int) -> Callable[[int], Batches]:
  """Shard -> (position -> batch, or None once the data is used up)."""

  def make(shard: int):
    with exits.edge():
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


def _loop_config(cfg: config.RunConfig) -> LearnerConfig:
  return LearnerConfig(
    lr_index=cfg.lr_index,
    max_steps=cfg.max_steps,
    loss_spike_factor=cfg.loss_spike_factor,
  )


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


def _check_directory(directory: pathlib.Path, *, restore: bool) -> None:
  """One directory, one run of plain training."""
  holds_run = (directory / "metrics.jsonl").exists()
  if restore and not holds_run:
    raise InUse(
      f"{directory} has no run to restore. Start without --restore, or give"
      " the --run_dir of an earlier run."
    )
  if holds_run and not restore:
    raise InUse(
      f"{directory} already holds a run. Add --restore to go on with it, or"
      " give another --run_dir."
    )


def make_trainer(
  cfg: config.Config, seed: int | None, step_s: float = 0.0
) -> trainer.Trainer:
  """A config's model on its mesh; see `Trainer` for the others."""
  return trainer.Trainer(
    transformer.make_model(cfg.model),
    cfg.train,
    mesh.make_mesh(cfg.mesh),
    seed,
    step_s,
  )


class _Boundaries:
  """Writes records and checkpoints; steps of a checkpoint go on from offset."""

  def __init__(
    self,
    cfg: config.Config,
    model: trainer.Trainer,
    saved: Checkpoints,
    records: metrics.MetricsWriter,
    offset: int,
  ):
    self._cfg = cfg
    self._model = model
    self._saved = saved
    self._records = records
    self._offset = offset
    self._last: tuple[int, Any] | None = None  # Not saved yet.

  def __call__(self, step: int, record: trainer.Record, progress: Any) -> None:
    self._last = step, progress
    self.note(record)
    every = self._cfg.run.checkpoint_every_steps
    if every and step % every == 0:
      self._try_to_save()

  def note(self, record: trainer.Record) -> None:
    """Writes a step's record, if it is one of those that are logged."""
    if record and record["step"] % self._cfg.run.log_every_steps == 0:
      self._records.write(record)

  def _try_to_save(self) -> None:
    try:
      self.save()
    except exits.WriteFailed as error:
      _log.error("%s", error)
      self._records.write({"what": "write_failed", "reason": str(error)})
      if self._cfg.run.on_write_error == "stop":
        raise

  def save(self) -> None:
    """Saves the newest boundary, if it is not saved yet."""
    if self._last is not None:
      (step, progress), self._last = self._last, None
      with exits.writing_checkpoints():
        self._model.save(self._saved, self._offset + step, progress)
