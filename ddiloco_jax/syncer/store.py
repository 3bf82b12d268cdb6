"""A run's directory: one run, one directory, one lock.

Holds the lock for as long as the process lives, takes the next epoch at every
start, and keeps what a restart needs: the syncer's checkpoints (`params` as an
item of its own, so that plain orbax restores it, beside `outer`, `state` and
`spec`), and the journal of the commits since. Until `begin`, which is called
once nothing can refuse the start any more, the run in it is as it was.
"""

import contextlib
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ddiloco_jax.algorithm import fragments
from ddiloco_jax.protocol import events, machine, saved
from ddiloco_jax.syncer import lock, losses, manifest, restoring
from ddiloco_jax.syncer.errors import InUse
from ddiloco_jax.syncer.files import Files, OsFiles
from ddiloco_jax.syncer.journal import Journal, Place
from ddiloco_jax.syncer.merger import Tensors
from ddiloco_jax.syncer.restoring import Restored
from ddiloco_jax.syncer.tapes import Tapes
from ddiloco_jax.training import checkpoint, seal

_log = logging.getLogger(__name__)


class _Changed(NamedTuple):
  """A fragment that is not on disk yet."""

  n: int
  arrays: list[np.ndarray]  # Theta in the order of its paths, then outer.


class Store:
  """Opens a run's directory.

  Args:
    directory: Made if missing.
    restore: Go on with the run in it.
    max_to_keep: Checkpoints kept.
    files: Operations on files.
    accept_loss: Go on although published versions are lost.
    may_begin: A directory without a run is none to refuse, though `restore`
      is set.
    takes_over: The epoch to take, before anything is read, from a syncer that
      may still hold the lock; 0 for a start that waits its turn.
    claimed: Called with the epoch, as far as it is known by then, once the
      directory is this process's and before anything in it is read.

  Attributes:
    epoch: Of this start, once `restore` has been called if there is progress.
    has_progress: Whether there is a checkpoint. A run that was killed before
      its first one has none, nobody has joined it, and it begins afresh.
    takes_over: Whether this start was given an epoch to take over.

  Raises:
    InUse: a live syncer holds it, or it has a run's progress and `restore` is
      not set, or `restore` is set and there is no run, or it has merges and no
      checkpoint.
    TooLate: another syncer has taken that epoch, or a later one.
  """

  def __init__(
    self,
    directory: str,
    *,
    restore: bool,
    max_to_keep: int = 3,
    files: Files | None = None,
    accept_loss: bool = False,
    may_begin: bool = False,
    takes_over: int = 0,
    claimed: Callable[[int], object] = lambda epoch: None,
  ):
    self.path = pathlib.Path(directory)
    self.path.mkdir(parents=True, exist_ok=True)
    self._files = files or OsFiles()
    self._journal = Journal(self.path / "journal", self._files)
    with contextlib.ExitStack() as stack:
      stack.callback(self._journal.close)
      if takes_over:
        self._lock = lock.take_over(self.path, self._journal, takes_over)
      else:
        self._lock = lock.take(self.path)
      stack.callback(self._lock.close)
      claimed(takes_over or 1 + self._journal.last_epoch())
      self.checkpoints = checkpoint.Checkpoints(
        str(self.path / "checkpoints"), max_to_keep=max_to_keep
      )
      self.takes_over = bool(takes_over)
      self._accept_loss = accept_loss
      self._unused: list[int] = []  # Checkpoints newer than the restored one.
      self._newest = self.checkpoints.latest()  # Or under way.
      self.has_progress = self._newest is not None
      self._place: Place | None = None  # Of the newest commit restored.
      self._changed: dict[int, _Changed] = {}
      last = self._journal.last_begun()
      self._tapes = Tapes(self.path, self._files, last)
      self.epoch = 1 + max(self._journal.last_epoch(), self._tapes.epoch)
      if takes_over:
        self.epoch = max(takes_over, 1 + self._tapes.epoch)
      self._check(restore=restore, may_begin=may_begin or bool(takes_over))
      stack.pop_all()

  def _check(self, *, restore: bool, may_begin: bool) -> None:
    is_empty = not self.has_progress and self.epoch == 1
    if restore and is_empty and not may_begin:
      raise InUse(
        f"{self.path} has no run to restore. Start without --restore, or give"
        " the --run_dir of an earlier run."
      )
    if self.has_progress and not restore:
      raise InUse(
        f"{self.path} already holds a run. Add --restore to go on with it, or"
        " give another --run_dir."
      )
    if not self.has_progress and self._has_merges():
      raise InUse(
        f"{self.path} has no complete checkpoint, although its journal or tape"
        " has merges: a run goes on from a checkpoint and the journal since."
        f" Bring {self.checkpoints.directory} back from a copy, or give"
        " another --run_dir; nothing was changed."
      )

  def _has_merges(self) -> bool:
    published = self._tapes.published
    if published is not None and any(published.versions):
      return True
    # Its damage tells of no fresh run, either.
    commits = ("format" not in e.head for e in self._journal.entries())
    return any(commits) or bool(self._journal.damage)

  @property
  def tape(self) -> pathlib.Path:
    return self._tapes.newest

  @property
  def last_settings(self) -> dict[str, Any] | None:
    """Of the newest start that has a tape; None if no tape tells them.

    A checkpoint may be older than that start.
    """
    published = self._tapes.published
    return None if published is None else published.settings

  def begin(self, run_id: str, num_merges: int = 0) -> None:
    """Makes this start durable: takes the epoch, sets the old tape aside.

    Args:
      run_id: Of the run.
      num_merges: Merges in what was restored.

    Raises:
      InUse: another syncer has taken the epoch.
    """
    self._lock.check()
    if self._journal.fenced != self.epoch:
      try:
        self._journal.fence(self.epoch)
      except FileExistsError:
        raise InUse(
          f"another syncer has begun epoch {self.epoch} of the run in"
          f" {self.path} since this one read it. Stop one of them."
        ) from None
      self._lock.check()  # Who takes over looks the other way round.
    for step in self._unused:
      path = self.checkpoints.set_aside(step)
      _log.warning("the checkpoint %d does not count; it is now %s", step, path)
    self._tapes.set_aside()
    self._journal.begin({"run_id": run_id}, self._place, num_merges)
    self._drop_covered()  # A life may be too short for a save.

  def restore(
    self,
    layout: fragments.Layout,
    tx: optax.GradientTransformation,
    check: Callable[[Mapping[str, Any]], None] = lambda record: None,
  ) -> Restored:
    """The newest checkpoint that can be read, and the commits since.

    Args:
      layout: Of the model; the checkpoint's must be the same.
      tx: The outer optimizer, whose state is restored.
      check: Called with the record of the run; raises ValueError.

    Raises:
      ValueError: the checkpoint is of another model, split, outer optimizer or
        release; none can be read; the journal is of another run; or what was
        published is lost, and that is not accepted.
    """
    found = self._read_newest(layout, tx, check)
    found, self._place, doubts = restoring.add_commits(self._journal, found)
    losses.check(
      self.path,
      restoring.versions_of(found),
      doubts,
      self._journal.end,
      self._tapes.published,
      self._accept_loss,
    )
    self.epoch = max(self.epoch, found.state["epoch"] + 1)
    return found

  def restore_from(
    self,
    cut: pathlib.Path,
    layout: fragments.Layout,
    tx: optax.GradientTransformation,
    check: Callable[[Mapping[str, Any]], None],
  ) -> Restored:
    """The syncer's part of a cut, which another directory holds.

    Args:
      cut: Of a whole one.
      layout, tx, check: See `restore`.

    Raises:
      ValueError: it is damaged, or of another model, split, outer optimizer or
        release, or not what its manifest says.
    """
    part = cut / manifest.SYNCER
    seal.check(part)
    with checkpoint.Checkpoints(part, read_only=True) as found:
      restored = restoring.read_checkpoint(found, 0, layout, tx, check)
    manifest.check(cut, restored.state)
    self.epoch = max(self.epoch, restored.state["epoch"] + 1)
    return restored

  def _read_newest(
    self,
    layout: fragments.Layout,
    tx: optax.GradientTransformation,
    check: Callable[[Mapping[str, Any]], None],
  ) -> Restored:
    """The newest checkpoint that can be read."""
    unread = []
    for step in reversed(self.checkpoints.steps()):
      try:
        found = restoring.read_checkpoint(
          self.checkpoints, step, layout, tx, check
        )
      except checkpoint.CheckpointError as error:
        unread.append(f"{self.checkpoints.directory / str(step)}")
        self._unused.append(step)
        _log.warning(
          "the checkpoint %s is damaged, an older one is tried: %s",
          unread[-1],
          error.__cause__,
        )
        continue
      least = self._journal.least_begun(found.state["epoch"])
      if least is not None and step > least:
        self._unused.append(step)
        _log.warning(
          "the checkpoint %d of epoch %d does not count: a later epoch went on"
          " from merge %d",
          step,
          found.state["epoch"],
          least,
        )
        continue
      self._newest = step
      return found
    raise ValueError(
      f"no checkpoint can be read; damaged: {', '.join(unread)}. Bring one back"
      " from a copy, or give another --run_dir; nothing was changed."
    )

  def commit(
    self,
    state: machine.State,
    merged: events.Merged,
    theta: Mapping[str, np.ndarray],
    outer_state: Any,
  ) -> None:
    """Returns once a merge is on disk: then it may be published.

    Args:
      state: A state in which the merge is under way.
      merged: The merge.
      theta: Of its fragment.
      outer_state: Of its fragment.

    Raises:
      OSError: it could not be written; the next commit writes it, too.
      Superseded: another syncer has taken over the run.
    """
    arrays = [theta[path] for path in sorted(theta)]
    arrays += jax.tree.leaves(outer_state)
    self._changed[merged.fragment] = _Changed(merged.version.n, arrays)
    num_merges = sum(f.version.n for f in state.fragments) + 1
    changed = sorted(self._changed.items())
    self._journal.append(
      {
        "num_merges": num_merges,
        "fragments": [[p, c.n, len(c.arrays)] for p, c in changed],
        "merged": saved.encode(merged),
        "state": machine.save(state),
      },
      [array for _, c in changed for array in c.arrays],
      num_merges,
    )
    self._changed.clear()

  def save(
    self, tensors: Tensors, state: machine.State, spec: dict[str, Any]
  ) -> None:
    """Starts an asynchronous save, unless these tensors are saved already.

    Raises:
      CheckpointError: the save before could not be finished, or this one not
        begun; the next call tries again.
    """
    self._drop_covered()
    step = sum(f.version.n for f in state.fragments)  # Merges so far.
    if step == self._newest:
      return
    if step in self.checkpoints.steps():
      # A syncer that was stopped within a save, taken over from, and went on.
      _log.warning("set aside: %s", self.checkpoints.set_aside(step))
    self.checkpoints.save(
      step,
      trees=restoring.trees_of(tensors),
      records={"state": machine.save(state), "spec": spec},
    )
    self._newest = step

  def _drop_covered(self) -> None:
    # Not of the newest: should it be damaged, an older one must do.
    self._journal.drop_covered(min(self.checkpoints.steps(), default=0))

  def save_cut(
    self,
    snapshot: int,
    tensors: Tensors,
    state: machine.State,
    spec: dict[str, Any],
  ) -> str:
    """Writes the syncer's part of a cut; returns its directory, on disk.

    It is apart from checkpoints and journal, and is never rotated away.

    Raises:
      OSError: it could not be written, or another cut has its place.
      CheckpointError: it could not be written.
    """
    path = manifest.path_of(self.path, snapshot)
    path.mkdir(parents=True)
    with checkpoint.Checkpoints(path / manifest.SYNCER) as saving:
      saving.save(
        0,
        trees=restoring.trees_of(tensors),
        records={"state": machine.save(state), "spec": spec},
      )
    seal.seal(path / manifest.SYNCER)
    return str(path)

  def name_cut(self, over: events.SnapshotOver) -> None:
    """Writes what a cut holds, its manifest.json: then it is one.

    Raises:
      OSError: it could not be written.
      Superseded: another syncer has taken over the run.
    """
    self.check_not_superseded()
    manifest.write(self.path, over, self._files)

  def last_cut(self) -> int:
    """The highest number that a cut in this directory has had; 0: none."""
    return manifest.last(self.path)

  def check_not_superseded(self) -> None:
    """Raises Superseded if another syncer has taken over the run."""
    self._journal.check_not_superseded()

  def begin_save(self) -> None:
    """To be called before what `save` is given is taken: it covers the rest."""
    self._journal.rotate()

  def wait(self) -> None:
    """Blocks until what was saved is on disk."""
    self.checkpoints.wait()

  def close(self) -> None:
    """Waits for saves under way, then gives up the lock."""
    self.checkpoints.close()
    self._journal.close()
    self._lock.close()
