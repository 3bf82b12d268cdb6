"""A learner's parts of consistent cuts: written aside, told when on disk.

They lie beside its checkpoints, in snapshots/ID, and are never rotated away.
(arXiv 2604.21428, App. E.)
"""

import pathlib
import threading
from collections.abc import Callable
from typing import Any

from ddiloco_jax.training import trainer
from ddiloco_jax.training.checkpoint import CheckpointError, Checkpoints

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

  def save(
    self, snapshot: int, step: int, progress: dict[str, Any], tell: Tell
  ) -> None:
    """Copies the state now, and tells from a thread once it is on disk."""
    saving = Checkpoints(self._directory / "snapshots" / str(snapshot))
    try:
      self._model.save(saving, step, progress)
    except (CheckpointError, ValueError) as error:
      saving.close()
      tell(str(error))
      return
    self._thread = threading.Thread(
      target=_finish, args=(saving, tell), name="cut", daemon=True
    )
    self._thread.start()

  def close(self) -> None:
    """Waits for the part that is being written."""
    if self._thread is not None:
      self._thread.join()


def _finish(saving: Checkpoints, tell: Tell) -> None:
  try:
    saving.close()
  except CheckpointError as error:
    tell(str(error))
  else:
    tell(None)
