"""A learner's parts of consistent cuts: written aside, and gone on from.

They lie beside its checkpoints, in snapshots/ID, and are never rotated away.
One without its seal is not whole. (arXiv 2604.21428, App. E.)
"""

import logging
import pathlib
import threading
from collections.abc import Callable

import numpy as np

from ddiloco_jax.algorithm import fragments
from ddiloco_jax.learner import part as parts
from ddiloco_jax.syncer import manifest
from ddiloco_jax.training import seal, trainer
from ddiloco_jax.training.checkpoint import CheckpointError, Checkpoints
from ddiloco_jax.wire import port

_log = logging.getLogger(__name__)
Tell = Callable[[str | None], None]


class Cuts:
  """Saves a trainer's state without holding up its steps.

  Args:
    directory: Of the learner.
    model: Whose state is saved.
  """

  def __init__(self, directory: pathlib.Path, model: trainer.Trainer):
    self._directory = directory
    self._model = model
    self._thread: threading.Thread | None = None

  def save(self, part: parts.Part, tell: Tell) -> None:
    """Copies the state now, and tells from a thread once it is on disk."""
    path = _path(self._directory, part.record.snapshot)
    saving = Checkpoints(path)
    beside = {"bases": _tree(part.bases), "copies": _tree(part.copies)}
    record = parts.to_json(part.record)
    try:
      self._model.save(saving, 0, record, beside)
    except (CheckpointError, ValueError) as error:
      saving.close()
      _fail(path, error, tell)
      return
    self._thread = threading.Thread(
      target=_finish, args=(saving, path, tell), name="cut", daemon=True
    )
    self._thread.start()

  def close(self) -> None:
    """Waits for the part that is being written."""
    if self._thread is not None:
      self._thread.join()


def restore(
  snapshot: pathlib.Path,
  learner: str,
  run: port.RunSpec,
  model: trainer.Trainer,
) -> parts.Part | None:
  """Puts a learner's train state of a cut into a model.

  Args:
    snapshot: RUN/snapshots/ID of the run that was cut, or "latest" for ID: the
      one that the syncer began from.
    learner: Its id.
    run: That it is to take part in.
    model: Its trainer.

  Returns:
    The rest of its part; None if it has none here: it is a newcomer.

  Raises:
    ValueError: the run began from another snapshot, or from none; the part is
      damaged, or of another model or release.
  """
  number = run.origin_snapshot
  if not run.origin_run_id or snapshot.name not in (
    str(number),
    manifest.LATEST,
  ):
    began = f"snapshot {number} of run {run.origin_run_id}"
    raise ValueError(
      f"--snapshot={snapshot} and the run {run.run_id} do not fit: the syncer"
      f" began {'from ' + began if run.origin_run_id else 'afresh'}. Start"
      " syncer and learners from one snapshot, or leave --snapshot out here."
    )
  path = _path(manifest.run_dir_of(snapshot) / "learners" / learner, number)
  if not path.exists():
    _log.warning(
      "learner %s has no part of snapshot %d here (%s): it was not in the cut,"
      " or its part is on another host; it joins as a newcomer",
      learner,
      number,
      path,
    )
    return None
  seal.check(path)
  with Checkpoints(path, read_only=True) as saved:
    part = _read(saved, path, run, model)
  cut = snapshot.with_name(str(number))
  # On another host than the syncer's there may be no more than the part.
  if cut.exists() and part.versions != (clock := manifest.read(cut).clock):
    raise ValueError(
      f"{path} is of the versions {part.versions}, and {cut} of {clock}: they"
      " are not of one cut. Bring back the part that belongs to it."
    )
  return part


def _read(
  saved: Checkpoints,
  path: pathlib.Path,
  run: port.RunSpec,
  model: trainer.Trainer,
) -> parts.Part:
  try:
    record = parts.from_json(saved.records(0)["progress"])
  except ValueError as error:
    raise ValueError(
      f"{path} was saved by another release: {error}. Go on with the release"
      " that wrote it."
    ) from error
  number = run.origin_snapshot
  if record.snapshot != number:
    raise ValueError(
      f"{path} is of snapshot {record.snapshot}, and lies where the part of"
      f" snapshot {number} belongs: bring that one back from a copy."
    )
  if record.run_id != run.origin_run_id:
    raise ValueError(
      f"{path} is of run {record.run_id}, and the syncer began from a snapshot"
      f" of run {run.origin_run_id}: give --snapshot in that run's directory."
    )
  model.restore(saved, 0)
  layout = run.layout
  like = {
    "bases": {str(p): _blank(layout, p) for p in range(len(record.anchors))},
    "copies": {
      str(copied.fragment): _blank(layout, copied.fragment)
      for copied in record.copies
    },
  }
  found = saved.restore(0, like)
  return parts.Part(
    record=record,
    bases=_arrays(found["bases"]),
    copies=_arrays(found["copies"]),
  )


def _path(directory: pathlib.Path, snapshot: int) -> pathlib.Path:
  return directory / "snapshots" / str(snapshot)


def _tree(arrays: parts.Arrays) -> dict[str, dict]:
  return {str(p): fragments.unflatten(part) for p, part in arrays.items()}


def _arrays(tree: dict[str, dict]) -> parts.Arrays:
  return {int(p): fragments.flatten(part) for p, part in tree.items()}


def _blank(layout: fragments.Layout, p: int) -> dict:
  return fragments.unflatten(
    {x.path: np.zeros(x.shape, np.float32) for x in layout.fragment(p)}
  )


def _finish(saving: Checkpoints, path: pathlib.Path, tell: Tell) -> None:
  try:
    saving.close()
    seal.seal(path)
  except (CheckpointError, OSError) as error:
    _fail(path, error, tell)
  else:
    tell(None)


def _fail(path: pathlib.Path, error: Exception, tell: Tell) -> None:
  _log.warning("not in snapshot %s: %s", path.name, error)
  tell(str(error))
