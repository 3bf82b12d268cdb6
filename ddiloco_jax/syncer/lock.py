"""The lock of a run's directory: held for as long as its process lives.

It keeps a second syncer from starting by mistake. That two never publish one
epoch is the journal's matter: a process that is stopped holds its lock, and is
taken over from all the same.
"""

import fcntl
import os
import pathlib

from ddiloco_jax.syncer.errors import InUse, TooLate
from ddiloco_jax.syncer.journal import Journal

_NAME = "lock"


class Lock:
  """Holds the lock of a run; see `take` and `take_over`."""

  def __init__(self, path: pathlib.Path, file: int):
    self._path = path
    self._file = file

  def check(self) -> None:
    """Raises InUse if another process has taken it over."""
    if not os.path.samestat(os.fstat(self._file), os.stat(self._path)):
      raise InUse(
        f"a standby has just taken over the run in {self._path.parent}, and"
        " serves it. To have two syncers, start this one with --standby."
      )

  def close(self) -> None:
    """Gives it up."""
    if self._file >= 0:
      os.close(self._file)
      self._file = -1


def take(run_dir: pathlib.Path) -> Lock:
  """The lock of a run, whose directory is there.

  Raises:
    InUse: another process holds it.
  """
  path = run_dir / _NAME
  return Lock(path, _open(path))


def take_over(run_dir: pathlib.Path, journal: Journal, epoch: int) -> Lock:
  """Takes an epoch, and then the lock from whoever holds it.

  Raises:
    TooLate: another syncer has taken that epoch, or a later one.
  """
  try:
    journal.fence(epoch)
  except FileExistsError:
    raise TooLate(f"another syncer has taken epoch {epoch}") from None
  part = run_dir / f"{_NAME}.{epoch}"  # Ours alone, as the epoch is.
  lock = Lock(run_dir / _NAME, _open(part))
  part.rename(run_dir / _NAME)
  newest = journal.last_epoch()
  if newest > epoch:  # Who starts looks the other way round.
    lock.close()
    raise TooLate(f"another syncer has taken epoch {newest}")
  return lock


def _open(path: pathlib.Path) -> int:
  file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    os.close(file)
    raise InUse(
      f"{path.parent} is locked by a syncer that is running: one directory"
      " holds one run. Stop that syncer, give another --run_dir, or start this"
      " one with --standby, to take over when that one is gone."
    ) from None
  return file
