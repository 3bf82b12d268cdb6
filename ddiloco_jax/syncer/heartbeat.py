"""The sign of life of a syncer that others stand by for.

A counter in RUN/heartbeat.json, renewed from a thread of its own. No clocks are
compared: a standby takes over once the counter has not moved for a lease on its
clock, and the syncer decides nothing more once half a lease has passed on its
own since a renewal began that was completed.
"""

import contextlib
import dataclasses
import json
import logging
import pathlib
import threading
import time
from collections.abc import Callable

from ddiloco_jax.syncer.errors import Superseded
from ddiloco_jax.syncer.files import Files
from ddiloco_jax.syncer.journal import Journal

_log = logging.getLogger(__name__)
_RENEWALS = 8  # In a lease: three may fail before it is half over.
NAME = "heartbeat.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
  """What a syncer says of itself.

  Attributes:
    epoch: Of the run, that it serves or is about to.
    counter: Moves while it lives.
    lease_s: Without a move for so long, it is taken over from.
    address: HOST:PORT.
    ended: Why its run has ended, if it has.
    exit_code: With which it ends then.
  """

  epoch: int
  counter: int
  lease_s: float
  address: str
  ended: str = ""
  exit_code: int = 0


def clock_s() -> float:
  """Seconds that never go back, and go on while the machine is suspended."""
  if hasattr(time, "CLOCK_BOOTTIME"):
    return time.clock_gettime(time.CLOCK_BOOTTIME)
  return time.monotonic()


def read_beat(run_dir: pathlib.Path) -> Beat | None:
  """The newest one of a run; None if no syncer of it renews any.

  Raises:
    OSError: it cannot be read.
    ValueError: it is damaged.
  """
  try:
    text = (run_dir / NAME).read_text("utf-8")
  except FileNotFoundError:
    return None
  try:
    return Beat(**json.loads(text))
  except (ValueError, TypeError) as error:
    raise ValueError(f"{run_dir / NAME} is damaged: {error}") from error


class Heartbeat:
  """Renews the counter of one start, and knows when it may not decide.

  Args:
    directory: Of the run.
    files: Operations on files.
    address: HOST:PORT of this syncer.
    lease_s: See Beat; 0 for none, when nothing is renewed or checked.
    on_lost: Called once with the reason, from a thread that waits for no file,
      when half a lease has passed.
    now: See `clock_s`.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    files: Files,
    address: str,
    lease_s: float,
    on_lost: Callable[[Superseded], None] = lambda error: None,
    now: Callable[[], float] = clock_s,
  ):
    self._directory = directory
    self._files = files
    self._beat = Beat(epoch=0, counter=0, lease_s=lease_s, address=address)
    self._newest_epoch = Journal(directory / "journal", files).last_epoch
    self._on_lost = on_lost
    self._now = now
    self._renewed = now()
    self._failure = ""
    self._lost = ""  # Why, once it is.
    self._is_ended = False
    self._writing = threading.Lock()
    self._over = threading.Event()

  def start(self, epoch: int) -> None:
    """Writes the first one of an epoch, and goes on.

    Raises:
      OSError: it cannot be written.
    """
    if not self._beat.lease_s:
      return
    self._beat = dataclasses.replace(self._beat, epoch=epoch)
    self._renewed = self._now()
    self._write()
    for target in (self._renew, self._watch):
      threading.Thread(target=target, name="heartbeat", daemon=True).start()

  def begin(self, epoch: int) -> None:
    """The start goes well, with this epoch, maybe a later one.

    Raises:
      Superseded: as `check`.
    """
    self.check()
    if self._beat.lease_s:
      with self._writing:
        self._beat = dataclasses.replace(self._beat, epoch=epoch)
    else:  # Nobody is to wait for a syncer that promises nothing.
      with contextlib.suppress(FileNotFoundError):
        self._files.unlink(self._directory / NAME)

  def check(self) -> None:
    """Raises Superseded from when half a lease has passed without a renewal."""
    silent_s, lease_s = self._now() - self._renewed, self._beat.lease_s
    if not self._lost and 0 < lease_s < 2 * silent_s:
      why = f": {self._failure}" if self._failure else ""
      self._lost = self._lost or self._why(
        f"the heartbeat was not renewed for {silent_s:.1f} s, and half of"
        f" run.standby_lease_s={lease_s:g} is the limit{why}. A standby may"
        " have taken over"
      )
    if self._lost:
      raise Superseded(self._lost)

  def end(self, reason: str, exit_code: int) -> None:
    """Says that the run has ended: nobody is to take over."""
    if not self._beat.lease_s:
      return
    try:
      self._write(reason or "it ended", exit_code)
    except OSError as error:
      _log.error("that the run has ended is not in its heartbeat: %s", error)

  def close(self) -> None:
    """Renews no more."""
    self._over.set()

  def _renew(self) -> None:
    pause_s = self._beat.lease_s / _RENEWALS
    while not (self._over.wait(pause_s) or self._is_ended):
      began = self._now()
      try:
        self._check_newest()
        self.check()  # Who was stopped for too long does not come back.
        self._write()
      except Superseded:
        return
      except OSError as error:
        if not self._failure:
          _log.warning("the heartbeat is not renewed: %s", error)
        self._failure = str(error)
      else:
        self._renewed, self._failure = began, ""

  def _check_newest(self) -> None:
    newest = self._newest_epoch()
    if newest > self._beat.epoch:
      self._lost = self._lost or self._why(f"epoch {newest} has begun")

  def _why(self, what: str) -> str:
    return (
      f"{what}: the syncer of epoch {self._beat.epoch} of the run in"
      f" {self._directory} decides and publishes nothing more. Its learners"
      " find another syncer by themselves."
    )

  def _write(self, ended: str = "", exit_code: int = 0) -> None:
    with self._writing:
      if self._is_ended:
        return
      self._is_ended = bool(ended)
      self._beat = beat = dataclasses.replace(
        self._beat,
        counter=self._beat.counter + 1,
        ended=ended,
        exit_code=exit_code,
      )
      part = self._directory / f"heartbeat.{beat.epoch}.part"
      with contextlib.suppress(FileNotFoundError):
        self._files.unlink(part)  # Of a renewal that failed.
      fd = self._files.create(part)
      try:
        text = json.dumps(dataclasses.asdict(beat), allow_nan=False)
        self._files.write(fd, memoryview(text.encode()))
        self._files.sync(fd)
      finally:
        self._files.close(fd)
      self._files.rename(part, self._directory / NAME)

  def _watch(self) -> None:
    """Waits for no file: a disk that hangs is the syncer's end, too."""
    while not self._over.wait(self._beat.lease_s / 4 / _RENEWALS):
      try:
        self.check()
      except Superseded as error:
        _log.error("%s", error)
        self._on_lost(error)
        return
