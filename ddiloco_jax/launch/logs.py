"""What stands in the log of a process, and what libraries keep out of it.

A save that fails is told by the one who asked for it, in one sentence. The
threads that orbax saves with each log the same error with its traceback, one
per write and per stage, and what tensorstore has still to write finds its event
loop closed; those are dropped, and nothing else is.
"""

import asyncio.base_events
import logging
import os
import sys
import traceback

# Where orbax logs an exception of a save, and raises it from `save`, `wait` or
# `close` too.
_RAISED_TOO = {
  ("future.py", "run"),
  ("async_checkpointer.py", "_thread_func"),
  ("checkpoint_manager.py", "wait_until_finished"),
}
_ASYNCIO = os.path.dirname(asyncio.base_events.__file__)


def begin() -> None:
  """Sends the log of this process to stderr."""
  logging.basicConfig(
    level=logging.INFO,
    format="%(asctime)s %(levelname)s %(message)s",
    force=True,
  )
  for name in ("absl", "jax", "orbax"):  # They speak of their own insides.
    logging.getLogger(name).setLevel(logging.WARNING)
  logging.getLogger("absl").addFilter(_is_news)
  sys.unraisablehook = _show


def _is_news(record: logging.LogRecord) -> bool:
  """Whether a record is not of an exception that is raised to us as well."""
  where = record.filename, record.funcName
  return not (record.exc_info and where in _RAISED_TOO)


def _show(fault: "sys.UnraisableHookArgs") -> None:
  """Shows what nobody can catch, but for writes that outlast their save.

  When the first write of a save fails, orbax closes the event loop of the
  others; each of them finds it closed, in a thread of tensorstore's, with no
  frame of anybody's but asyncio's.
  """
  frames = traceback.extract_tb(fault.exc_traceback)
  if (
    fault.exc_type is RuntimeError
    and frames
    and all(os.path.dirname(f.filename) == _ASYNCIO for f in frames)
  ):
    return
  sys.__unraisablehook__(fault)
