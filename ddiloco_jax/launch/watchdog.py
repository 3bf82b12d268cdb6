"""Ends a process whose main thread hangs, so that its launcher starts it again.

A hung collective, a dead file system or a compilation without end would keep a
learner live by its link's heartbeats and out of the run for ever. The sign of
life is the question whether to stop, which the main thread asks at every step
boundary and in every wait; a thread of the link cannot give it.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable

from ddiloco_jax.launch import exits

_LOOKS = 20  # At least so often within the limit.
_LOOK_S = 1.0


class Watchdog:
  """Watches from its making on; called as the `should_stop` of a process.

  Args:
    limit_s: Longest time between two signs of life; 0 watches nothing.
    should_stop: What is asked.
    end: Ends the process with a code.
    now: Monotonic, seconds.
  """

  def __init__(
    self,
    limit_s: float,
    should_stop: Callable[[], bool],
    end: Callable[[int], object] = os._exit,
    now: Callable[[], float] = time.monotonic,
  ):
    self._limit_s = limit_s
    self._should_stop = should_stop
    self._end = end
    self._now = now
    self._heard_at = now()
    self._over = threading.Event()
    if limit_s > 0:
      threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

  def __call__(self) -> bool:
    self._heard_at = self._now()
    return self._should_stop()

  def close(self) -> None:
    """Watches no longer."""
    self._over.set()

  def _watch(self) -> None:
    look_s = min(_LOOK_S, self._limit_s / _LOOKS)
    looked_at = self._now()
    while not self._over.wait(look_s):
      now = self._now()
      # A process that was stopped did not hang: that time does not count.
      stopped_s = max(0.0, now - looked_at - 10 * look_s)
      self._heard_at, looked_at = self._heard_at + stopped_s, now
      silent_s = now - self._heard_at
      if silent_s > self._limit_s:
        text = (
          f"no step boundary for {silent_s:.0f} s (run.stuck_s is"
          f" {self._limit_s:g}): this process hangs and ends with exit code"
          f" {exits.STUCK}; its threads follow\n"
        )
        os.write(2, text.encode())  # The main thread may hold the log's lock.
        faulthandler.dump_traceback(2, all_threads=True)
        self._end(exits.STUCK)
        return
