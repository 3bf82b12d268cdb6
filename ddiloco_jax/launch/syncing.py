"""Assembles a syncer from a config and a directory, and sees its run to the end.

The one place where the machine, the merger, the store and the tape meet; tests
use it in process, `launch/serving.py` behind a gRPC server.
"""

import contextlib
import functools
import json
import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments, outer
from ddiloco_jax.launch import exits, provenance, run_log, starting
from ddiloco_jax.models import transformer
from ddiloco_jax.protocol import events, machine, tape
from ddiloco_jax.syncer.errors import Superseded
from ddiloco_jax.syncer.files import Files, OsFiles
from ddiloco_jax.syncer.heartbeat import Heartbeat
from ddiloco_jax.syncer.merger import Merger
from ddiloco_jax.syncer.payloads import PayloadWriter
from ddiloco_jax.syncer.store import Store
from ddiloco_jax.syncer.syncer import CutFiles, Syncer
from ddiloco_jax.training import metrics
from ddiloco_jax.training.checkpoint import CheckpointError

_log = logging.getLogger(__name__)


class Post(NamedTuple):
  """Where a run is served, and how its process comes to serve it.

  Attributes:
    address: HOST:PORT, for those who stand by.
    takes_over: The epoch to take, for a standby; 0 for any other start.
    on_lost: Called, from a thread that waits for nothing, when the run may have
      been taken over; see `Heartbeat`.
  """

  address: str = ""
  takes_over: int = 0
  on_lost: Callable[[Superseded], None] = lambda error: None


class SyncerRun:
  """A syncer with its store and records.

  Args:
    cfg: Settings; what the checkpoint says of the run rules at a restore.
    run_dir: The run's directory.
    restore: Go on with the run in it.
    theta: Parameters to start from, path -> float32 array; None to initialise
      `cfg.model` from `cfg.run.seed`.
    tx: The outer optimizer; None for the one of `cfg.outer`.
    files: Operations on the files of commits.
    snapshot: Of another run: what a run without progress goes on from.
    post: See Post.

  Raises:
    InUse, TooLate: see Store.
    Superseded: the run was taken over while this process still restored it.
    BadUsage: settings that do not fit the model, or the checkpoint; a run that
      has reached its end; a directory that cannot be written to.
  """

  def __init__(
    self,
    cfg: config.Config,
    run_dir: str,
    *,
    restore: bool = False,
    theta: Mapping[str, np.ndarray] | None = None,
    tx: optax.GradientTransformation | None = None,
    files: Files | None = None,
    snapshot: pathlib.Path | None = None,
    post: Post = Post(),  # noqa: B008
  ):
    params = init_params(cfg) if theta is None else dict(theta)
    path = pathlib.Path(run_dir)
    with contextlib.ExitStack() as stack:
      with exits.edge(), exits.writing_to(path):
        layout = fragments.make_layout(
          fragments.shapes_of(params),
          cfg.fragments.kind,
          cfg.fragments.num_fragments,
        )
        tx = outer.make_outer(cfg.outer) if tx is None else tx
        files = files or OsFiles()
        self._heartbeat = Heartbeat(
          path, files, post.address, cfg.run.standby_lease_s, post.on_lost
        )
        stack.callback(self._heartbeat.close)
        self.store = Store(
          run_dir,
          restore=restore,
          max_to_keep=cfg.run.max_to_keep,
          files=files,
          accept_loss=cfg.run.accept_loss,
          may_begin=snapshot is not None,
          takes_over=post.takes_over,
          claimed=self._heartbeat.start,
        )
        stack.callback(self._close_store)
        start = starting.make_start(
          cfg, layout, params, tx, self.store, snapshot
        )
        self._heartbeat.begin(start.state.epoch)
        self._begin(cfg, start)
        stack.callback(self._metrics.close)
        self._payloads = self._make_payloads(cfg, start)
        if self._payloads is not None:
          stack.callback(self._payloads.close)
      self.syncer = self._make_syncer(cfg, start, tx)
      stack.callback(self._close_syncer)
      if not self.store.has_progress:
        with exits.writing_checkpoints():
          self._save()
          self.store.wait()  # Who joins finds the same run after any restart.
      self._closing = stack.pop_all()

  def run(self, should_stop: Callable[[], str | None]) -> events.Finished:
    """Serves until the run has finished; saves now and then, and at the end.

    Args:
      should_stop: Asked a few times a second; a reason ends the run in order.

    Raises:
      WriteFailed: a commit or a checkpoint, as `run.on_write_error` says.
      Superseded: another syncer has taken over the run.
      Exception: what else ended a thread of the syncer.
    """
    # Counted from the checkpoint that was restored: one that dies again and
    # again would else never save, and its next start would read ever more.
    saved, stopping = time.monotonic() - self._unsaved_s, False
    cut_at = self._num_merges()
    say_wait = run_log.WaitLog(self.syncer)
    while (finished := self.syncer.wait(0.2)) is None:
      self._heartbeat.check()
      say_wait()
      reason = should_stop()
      if reason and not stopping:
        stopping = True
        self.syncer.request_stop(reason)
      if 0 < self._cut_every <= self._num_merges() - cut_at:
        cut_at = self._num_merges()
        self.syncer.request_snapshot()
      if time.monotonic() - saved > self._every_s:
        try:
          self._save()
        except CheckpointError as error:
          self._write_failed("no checkpoint", error)
        saved = time.monotonic()
    with exits.writing_checkpoints():
      self._save()
      self.store.wait()
    self._heartbeat.end(finished.reason, finished.exit_code)
    return finished

  def close(self) -> None:
    """Ends threads, records and the lock."""
    self._closing.close()

  def _close_syncer(self) -> None:
    state = self.syncer.close()
    try:
      self._tape.close(state)
    except OSError as error:
      _log.error("the end of the tape is not written: %s", error)

  def _close_store(self) -> None:
    with exits.writing_checkpoints():
      self.store.close()

  def _begin(self, cfg: config.Config, start: starting.Start) -> None:
    """Opens what a run writes; nothing can refuse the start any more."""
    self._record = {
      "run_id": start.spec.run_id,
      "layout_digest": start.spec.layout.digest(),
      "origin": [start.spec.origin_run_id, start.spec.origin_snapshot],
      "config": json.loads(config.to_json(cfg)),
    }
    self._every_s = cfg.run.checkpoint_every_s
    self._unsaved_s = start.unsaved_s
    self._is_durable = cfg.run.durability == "commit"
    self._on_write_error = cfg.run.on_write_error
    self._cut_every = cfg.run.snapshot_every_merges
    if start.spec.origin_run_id and not self.store.has_progress:
      # First of all: whoever starts it again finds the cut, or nothing.
      with exits.writing_checkpoints():
        self.store.save(start.tensors, start.state, self._record)
        self.store.wait()
    num_merges = sum(f.version.n for f in start.state.fragments)
    self.store.begin(start.spec.run_id, num_merges)
    (self.store.path / "config.json").write_text(config.to_json(cfg))
    head = tape.header(
      start.state,
      run_id=start.spec.run_id,
      machine_type=provenance.machine_type(),
      libraries=provenance.libraries(),
      settings=self._record["config"],
    )
    self._tape = tape.TapeWriter(self.store.tape, head)
    self._metrics = metrics.MetricsWriter(self.store.path / "metrics.jsonl")

  def _make_payloads(
    self, cfg: config.Config, start: starting.Start
  ) -> PayloadWriter | None:
    if not cfg.run.record_payloads:
      return None
    return PayloadWriter(
      self.store.path / "payloads",
      start.state.epoch,
      provenance.name_tensors(start.tensors),
      lambda reason: self._metrics.write(
        {"what": "payloads_stopped", "reason": reason}
      ),
    )

  def _make_syncer(
    self,
    cfg: config.Config,
    begin: starting.Start,
    tx: optax.GradientTransformation,
  ) -> Syncer:
    spec, state, tensors, _ = begin
    make_merger = functools.partial(
      Merger,
      spec.layout,
      tensors,
      tuple(f.version for f in state.fragments),
      tx,
      cfg.merge,
      cfg.wire.down_format,
      record=self._payloads.write if self._payloads else None,
      commit=self._commit,
    )
    start = time.monotonic() - state.now
    return Syncer(
      spec,
      state,
      self._note,
      make_merger,
      now=lambda: time.monotonic() - start,
      cut_files=CutFiles(
        lambda number, tensors, state: self.store.save_cut(
          number, tensors, state, self._record
        ),
        self.store.name_cut,
        self._cut_failed,
      ),
    )

  def _commit(
    self,
    merged: events.Merged,
    theta: Mapping[str, np.ndarray],
    outer_state: Any,
  ) -> None:
    """Makes a merge durable, as the settings have it, before it is published.

    Raises:
      WriteFailed: it is not durable.
      Superseded: another syncer has taken over the run.
    """
    if not self._is_durable:
      self.store.check_not_superseded()
      return
    try:
      self.store.commit(self.syncer.state, merged, theta, outer_state)
    except OSError as error:
      what = f"version {merged.version.n} of fragment {merged.fragment} is not"
      self._write_failed(f"{what} durable", error)
      self.store.check_not_superseded()

  def _write_failed(self, what: str, error: Exception) -> None:
    """Says so everywhere; then the run stops, or goes on without it.

    Raises:
      WriteFailed: it is to stop.
    """
    reason = self._say_failed(
      what, error, f"run.on_write_error={self._on_write_error}"
    )
    if self._on_write_error == "stop":
      raise exits.WriteFailed(
        f"{reason}. What was published is durable: make room, or make the"
        " directory writable, and go on with --restore."
      ) from error

  def _cut_failed(self, number: int, error: Exception) -> None:
    self._say_failed(
      f"snapshot {number} is not", error, "the run goes on without it"
    )

  def _say_failed(self, what: str, error: Exception, then: str) -> str:
    reason = f"{what} in {self.store.path}: {error}"
    _log.error("%s; %s", reason, then)
    self._metrics.write({"what": "write_failed", "reason": reason})
    self.syncer.alarm(reason)
    return reason

  def _num_merges(self) -> int:
    return sum(f.version.n for f in self.syncer.state.fragments)

  def _save(self) -> None:
    self.store.begin_save()
    tensors, state = self.syncer.snapshot()
    self.store.save(tensors, state, self._record)

  def _note(
    self,
    event: events.Event,
    effects: tuple[events.Effect, ...],
    state: machine.State,
  ) -> None:
    self._heartbeat.check()  # Before anybody is told of it.
    try:
      self._tape.append(event, effects, state)
    except OSError as error:  # Nothing is decided that is not on the tape.
      raise exits.WriteFailed(
        f"the tape in {self.store.path} cannot be written: {error}. What was"
        " published is durable: make room, and go on with --restore."
      ) from error
    for effect in effects:
      if line := run_log.metrics_line(effect):
        self._metrics.write({"time": event.time, "t": state.t, **line})


def init_params(cfg: config.Config) -> dict[str, np.ndarray]:
  """Theta 0 of a config's model, float32 on the host, by tree path."""
  model = transformer.make_model(cfg.model)
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    params = jax.jit(
      functools.partial(transformer.init_params, model, cfg.run.seed)
    )()
  return {
    path: np.array(x)
    for path, x in fragments.flatten(jax.device_get(params)).items()
  }
