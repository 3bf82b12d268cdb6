"""Real processes for tests: started, watched, and ended by their own id."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
SYNCER = "ddiloco_jax.cli.syncer"
TRAIN = "ddiloco_jax.train"


class Process:
  """A command whose output, both streams together, goes to a file.

  Args:
    argv: The command.
    log: The file.
    env: Beside what this process has.
  """

  def __init__(
    self,
    argv: Sequence[str],
    log: pathlib.Path,
    env: dict[str, str] | None = None,
  ):
    self.log = log
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
      self._popen = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
      )
    self.pid = self._popen.pid

  def said(self) -> str:
    return self.log.read_text("utf-8", errors="replace")

  def is_running(self) -> bool:
    return self._popen.poll() is None

  def signal(self, number: int = signal.SIGTERM) -> None:
    self._popen.send_signal(number)

  def wait(self, timeout_s: float = 60.0) -> int:
    """The exit code; fails with the log if it goes on."""
    try:
      return self._popen.wait(timeout_s)
    except subprocess.TimeoutExpired:
      raise AssertionError(
        f"still running after {timeout_s} s:\n{self.said()[-3000:]}"
      ) from None

  def wait_for(
    self, condition: Callable[[], object], timeout_s: float = 60.0
  ) -> None:
    """Blocks until something holds; fails with the log if it ends first."""
    deadline = time.monotonic() + timeout_s
    while not condition():
      assert self.is_running(), self.said()[-3000:]
      assert time.monotonic() < deadline, self.said()[-3000:]
      time.sleep(0.05)

  def end(self) -> None:
    if self.is_running():
      self._popen.kill()
    self._popen.wait()


@contextlib.contextmanager
def ending() -> Iterator[Callable[..., Process]]:
  """Gives a function that starts processes; ends those still running."""
  started: list[Process] = []

  def start(argv: Sequence[str], log: pathlib.Path, **env: str) -> Process:
    started.append(Process(argv, log, env))
    return started[-1]

  try:
    yield start
  finally:
    for process in started:
      process.end()


def catches(pid: int, number: int) -> bool:
  """Whether a process has a handler of its own for a signal."""
  (caught,) = (
    line.split()[1]
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    if line.startswith("SigCgt:")
  )
  return bool(int(caught, 16) >> (number - 1) & 1)


def has_loaded(pid: int, library: str) -> bool:
  """Whether a process has mapped a file of this name."""
  return library in pathlib.Path(f"/proc/{pid}/maps").read_text()


def has_open(pid: int, path: pathlib.Path) -> bool:
  """Whether a process has a file open."""
  for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
    with contextlib.suppress(OSError):  # Closed meanwhile.
      if fd.readlink() == path.absolute():
        return True
  return False


def module(name: str, *flags: str) -> list[str]:
  return [sys.executable, "-m", name, *flags]


def overrides(**values: object) -> list[str]:
  """SECTION__NAME=value as flags."""
  return [
    f"--config.{name.replace('__', '.', 1)}={value}"
    for name, value in values.items()
  ]


def small_run(
  directory: pathlib.Path,
  theta: Mapping[str, np.ndarray] | None = None,
  **settings: object,
) -> tuple[str, ...]:
  """Flags of a syncer whose run is in directory/run, in two fragments.

  Args:
    theta: Theta 0; THETA of `over_grpc` if not given.
  """
  from tests.support.over_grpc import THETA  # Most processes need no gRPC.

  np.savez(directory / "theta.npz", **(THETA if theta is None else theta))
  return (
    "--config=tests/support/small.py",
    f"--run_dir={directory / 'run'}",
    f"--layout_arrays={directory / 'theta.npz'}",
    *overrides(sync__num_fragments=2, sync__quorum=2, **settings),
  )


def address_of(run_dir: pathlib.Path, syncer: Process) -> str:
  """Where a starting syncer serves."""
  syncer.wait_for(lambda: "syncer serves at" in syncer.said())
  return (run_dir / "address").read_text()
