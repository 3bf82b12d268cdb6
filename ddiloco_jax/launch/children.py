"""A planned process made real: a process group of its own, and a log file."""

import contextlib
import os
import pathlib
import signal
import subprocess
import time

from ddiloco_jax.launch.plan import ADDRESS, Process

_YIELDS = 5  # Above its launcher: a third of the weight.


class Child:
  """One process of a run over all its lives.

  Attributes:
    process: What it is started from.
    log: Where its output goes, appended life after life.
    num_starts: Lives so far.
    was_killed: This life was ended by a planned kill.
    started_s: When this life began, on the monotonic clock.
  """

  def __init__(self, process: Process, log_dir: pathlib.Path):
    self.process = process
    self.log = log_dir / f"{process.name}.log"
    self.num_starts = 0
    self.was_killed = False
    self.started_s = 0.0
    self._gives_way = False
    self._popen: subprocess.Popen | None = None

  @property
  def name(self) -> str:
    return self.process.name

  @property
  def pid(self) -> int | None:
    return self._popen.pid if self._popen else None

  @property
  def is_running(self) -> bool:
    return self._popen is not None and self._popen.poll() is None

  @property
  def exit_code(self) -> int | None:
    """Of the newest life; None while it runs; -N if signal N ended it."""
    return self._popen.poll() if self._popen else None

  def start(self, address: str = "") -> None:
    """Starts it, for the first time or again; `address` is the syncer's."""
    assert not self.is_running, f"{self.name} runs already"
    argv = self.process.again if self.num_starts else self.process.argv
    argv = tuple(word.replace(ADDRESS, address) for word in argv)
    self.log.parent.mkdir(parents=True, exist_ok=True)
    with self.log.open("ab") as log:
      log.write(f"--- start {self.num_starts + 1}\n".encode())
      log.flush()
      # A session of its own: a Ctrl-C at the terminal reaches the launcher
      # only, which then ends the run in order.
      self._popen = subprocess.Popen(
        argv,
        env={**os.environ, **self.process.env},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
    self.num_starts += 1
    self.was_killed = False
    self.started_s = time.monotonic()
    self._gives_way = False

  def give_way(self) -> None:
    """Lowers the priority of this life's threads.

    Whoever trains on this machine yields to the syncer and to whoever starts,
    which else gets little of the cores that the others' steps fill.
    """
    if self.is_running and not self._gives_way:
      self._gives_way = True
      assert self._popen
      own = os.getpriority(os.PRIO_PROCESS, 0)
      with contextlib.suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PGRP, self._popen.pid, own + _YIELDS)

  def signal(self, number: signal.Signals) -> None:
    """Sends a signal to it and to what it started; nothing if it is gone."""
    if self._popen is None or self._popen.poll() is not None:
      return
    # It may end between the two lines; poll() will say how.
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._popen.pid, number)

  def kill(self) -> None:
    """Ends this life as a failure would, and waits until it is over."""
    self.was_killed = True
    self.signal(signal.SIGKILL)
    if self._popen is not None:
      self._popen.wait()

  def last_lines(self, num_lines: int = 20) -> str:
    """The end of its log."""
    if not self.log.exists():
      return ""
    with self.log.open("rb") as log:
      log.seek(0, os.SEEK_END)
      log.seek(max(0, log.tell() - 16_384))
      lines = log.read().decode("utf-8", "replace").splitlines()
    return "\n".join(lines[-num_lines:])


def describe_exit(code: int) -> str:
  """An exit code as words."""
  if code >= 0:
    return f"exited with code {code}"
  try:
    name = signal.Signals(-code).name
  except ValueError:
    name = f"signal {-code}"
  return f"was ended by {name}"
