"""Run by a test: a syncer that stops itself at a write of its commits.

  python -m tests.support.stops_itself RUN_DIR POINT FLAGS...

POINT is "before" a commit is written, or "after" it is on disk. It happens once,
when RUN_DIR/stop_now is there.
"""

import pathlib
import signal
import sys
import threading

from ddiloco_jax import config
from ddiloco_jax.launch import exits, process, serving, signals
from ddiloco_jax.syncer.files import OsFiles
from tests.support.over_grpc import THETA


class StoppingFiles(OsFiles):
  """The operating system's, with one stop."""

  def __init__(self, armed: pathlib.Path, point: str):
    self._armed = armed
    self._point = point
    self._commits: set[int] = set()

  def create(self, path):
    fd = super().create(path)
    if path.suffix == ".log":
      self._commits.add(fd)
    return fd

  def close(self, fd):
    self._commits.discard(fd)
    super().close(fd)

  def write(self, fd, data):
    self._stop("before", fd)
    super().write(fd, data)

  def sync(self, fd):
    super().sync(fd)
    self._stop("after", fd)

  def _stop(self, point: str, fd: int) -> None:
    if fd in self._commits and point == self._point and self._armed.exists():
      self._armed.unlink()
      # To this thread: it takes no step more.
      signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def main() -> int:
  with exits.edge():
    cfg = config.parsed()
  start = serving.Start(
    cfg,
    RUN_DIR,
    THETA,
    files=StoppingFiles(RUN_DIR / "stop_now", POINT),
    on_lost=lambda lost: process.end_soon(lost, cfg.run.standby_lease_s / 2),
  )
  stop = signals.stop_on_signals()
  with serving.serving(start, "127.0.0.1:0") as served:
    print(f"syncer serves at {served.address}", flush=True)
    return served.run.run(stop.reason).exit_code


if __name__ == "__main__":
  RUN_DIR, POINT = pathlib.Path(sys.argv.pop(1)), sys.argv.pop(1)
  config.define_flag()
  process.run(main, __doc__)
