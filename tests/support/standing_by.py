"""A standby in this process, and files whose disk can be made to hang."""

import contextlib
import threading

from ddiloco_jax.launch import serving, standby
from ddiloco_jax.syncer.files import OsFiles


class HangingFiles(OsFiles):
  """Every operation waits while the disk hangs.

  Attributes:
    num_waiting: Operations that hang now.
  """

  def __init__(self):
    self._goes_on = threading.Event()
    self._goes_on.set()
    self.num_waiting = 0

  def hang(self) -> None:
    self._goes_on.clear()

  def go_on(self) -> None:
    self._goes_on.set()

  def _wait(self) -> None:
    self.num_waiting += 1
    self._goes_on.wait()
    self.num_waiting -= 1

  def create(self, path):
    self._wait()
    return super().create(path)

  def write(self, fd, data):
    self._wait()
    super().write(fd, data)

  def sync(self, fd):
    self._wait()
    super().sync(fd)

  def rename(self, old, new):
    self._wait()
    super().rename(old, new)

  def unlink(self, path):
    self._wait()
    super().unlink(path)


class StandbyRun(threading.Thread):
  """Stands by from its making on; serves when it is its turn.

  Attributes:
    address: HOST:PORT, once it listens.
    served: The run, once it serves it.
    finished: How that ended.
    error: What ended this one instead.
  """

  def __init__(self, start: serving.Start):
    super().__init__(name="standby", daemon=True)
    self._start = start
    self._told: str | None = None
    self._listens = threading.Event()
    self.address = ""
    self.served: serving.Served | None = None
    self.finished = None
    self.error: BaseException | None = None
    self.start()
    assert self._listens.wait(60.0), "it does not listen"

  def stop(self) -> None:
    self._told = "the test is over"

  def run(self) -> None:
    try:
      with standby.standing_by(
        self._start, "127.0.0.1:0", lambda: self._told, self._ready
      ) as self.served:
        self.finished = self.served.run.run(lambda: self._told)
    except BaseException as error:
      self.error = error
      self._listens.set()

  def _ready(self, address: str) -> None:
    self.address = address
    self._listens.set()


@contextlib.contextmanager
def standbys(*starts: serving.Start):
  """Several of them; those that still run are ended."""
  runs = [StandbyRun(start) for start in starts]
  try:
    yield runs
  finally:
    for run in runs:
      run.stop()
    for run in runs:
      run.join(30.0)
