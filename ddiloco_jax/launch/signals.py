"""SIGTERM and SIGINT: a process ends in order, from its first moments on.

What a command imports takes seconds. So its entry point calls `end_at_once`
before it imports anything but the standard library, this, and its flags.
"""

import os
import signal
import threading
from collections.abc import Callable

_BOTH = (signal.SIGTERM, signal.SIGINT)


class StopFlag:
  """Set by SIGTERM or SIGINT; a second one ends the process at once."""

  def __init__(self):
    self._signal = 0

  def __call__(self) -> bool:
    return bool(self._signal)

  def reason(self) -> str | None:
    """The signal as a reason, once there was one."""
    if not self._signal:
      return None
    return f"{_name(self._signal)} was received"

  def set(self, number: int, frame: object) -> None:
    if self._signal:
      os._exit(128 + number)
    self._signal = number


def end_at_once() -> None:
  """Until `stop_on_signals`: a process that has begun nothing ends well."""

  def end(number: int, frame: object) -> None:
    # No print: it may have interrupted one.
    os.write(2, f"{_name(number)} was received at the start\n".encode())
    os._exit(0)

  _install(end)


def stop_on_signals() -> StopFlag:
  """From now on there is something to end in order: whoever has the flag does.

  Call it on the main thread.
  """
  flag = StopFlag()
  _install(flag.set)
  return flag


def _install(handler: Callable[[int, object], None]) -> None:
  if threading.current_thread() is threading.main_thread():
    for number in _BOTH:
      signal.signal(number, handler)


def _name(number: int) -> str:
  return signal.Signals(number).name
