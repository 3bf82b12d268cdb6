"""How a command ends: one table of exit codes for all of them."""

import contextlib
import errno
import pathlib
from collections.abc import Iterator

from ddiloco_jax.syncer.errors import Stopping

OK = 0
FAILED = 1
BAD_USAGE = 2
FENCED = 3
QUORUM_TIMEOUT = 4
NO_SYNCER = 5
IN_USE = 6
WRITE_FAILED = 7
SUPERSEDED = 8
STUCK = 9

MEANINGS = {
  OK: "it ended well, also on SIGTERM or SIGINT, or was too late for the run",
  FAILED: "failure; its log says which",
  BAD_USAGE: "bad usage, config or data",
  FENCED: "another process took this learner's id, or an admin evicted it",
  QUORUM_TIMEOUT: "too few learners for sync.quorum_timeout_s",
  NO_SYNCER: "no syncer was there for run.connect_timeout_s or run.max_solo_s",
  IN_USE: "the address or the run directory is in use",
  WRITE_FAILED: "a commit or a checkpoint could not be written",
  SUPERSEDED: "another syncer has taken over the run",
  STUCK: "no step boundary for run.stuck_s: it hung",
}


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class BadUsage(ValueError):
  """What a user gave cannot be; it ends a command in one line, BAD_USAGE."""


class WriteFailed(Stopping):
  """What had to be durable could not be written."""


@contextlib.contextmanager
def edge() -> Iterator[None]:
  """Where it is checked what a user gave: a ValueError here is BadUsage.

  Anywhere else it is a fault of this program, and keeps its traceback.
  """
  try:
    yield
  except ValueError as error:
    raise BadUsage(str(error)) from error


@contextlib.contextmanager
def writing_to(directory: pathlib.Path) -> Iterator[None]:
  """Where what a process writes is opened: an OSError here is BadUsage, or
  WriteFailed where only room is missing."""
  try:
    yield
  except OSError as error:
    where = f" ({error.filename})" if error.filename else ""
    said = f"cannot write to {directory}: {error.strerror or error}{where}."
    if error.errno in _FULL:
      raise WriteFailed(f"{said} Make room, and start it again.") from error
    raise BadUsage(
      f"{said} Give another --run_dir, a directory that is there or can be"
      " made, and that this user may write to."
    ) from error


@contextlib.contextmanager
def writing_checkpoints() -> Iterator[None]:
  """Where a checkpoint must be written: that it cannot ends the command."""
  # Imported here: the commands that start at once save nothing.
  from ddiloco_jax.training.checkpoint import CheckpointError

  try:
    yield
  except CheckpointError as error:
    raise WriteFailed(str(error)) from error


def table(codes: tuple[int, ...] = tuple(MEANINGS)) -> str:
  """The exit codes as lines, for --help."""
  return "\n".join(f"  {code}  {MEANINGS[code]}" for code in codes)
