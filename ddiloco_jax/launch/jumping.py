"""Starts a module whose wall clock can be made to jump, from outside.

  python -m ddiloco_jax.launch.jumping DIRECTORY MODULE [FLAGS]

A user without privileges cannot set the clock of one process, so this shifts
what Python's `time.time` and `time.time_ns` say; the clocks of native code
(gRPC, XLA) are left. The monotonic clocks are left, too, as a real jump leaves
them. For storms only (`launch/inject.py`).
"""

import os
import pathlib
import runpy
import signal
import sys
import time


def jump(pid: int | None, directory: pathlib.Path, seconds: float) -> None:
  """Makes the clock of a process jump; one that is not ready has no jump."""
  path = directory / f"{pid}"
  if pid is not None and path.exists():
    path.write_text(f"{seconds}")
    os.kill(pid, signal.SIGUSR1)


def wait_for_jumps(directory: pathlib.Path) -> None:
  """From now on SIGUSR1 adds to this process's wall clock what its file says."""
  real_time, real_time_ns = time.time, time.time_ns
  path = directory / f"{os.getpid()}"
  offset_s = 0.0

  def add(number: int, frame: object) -> None:
    nonlocal offset_s
    offset_s += float(path.read_text() or 0.0)

  time.time = lambda: real_time() + offset_s
  time.time_ns = lambda: real_time_ns() + int(offset_s * 1e9)
  signal.signal(signal.SIGUSR1, add)
  directory.mkdir(parents=True, exist_ok=True)
  path.write_text("")  # Last: whoever sees it may send the signal.


def main() -> None:
  _, directory, module, *flags = sys.argv
  wait_for_jumps(pathlib.Path(directory))
  sys.argv = [module, *flags]
  runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()
