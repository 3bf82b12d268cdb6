"""What a standby sees of the syncer that it stands by for.

It counts the time in which it looked, on its own clock, and nothing moved: a
standby that was itself stopped for a while has seen nothing.
"""

import pathlib
from collections.abc import Callable

from ddiloco_jax.syncer.heartbeat import Beat, clock_s, read_beat
from ddiloco_jax.syncer.journal import Journal

_LOOKS = 20  # In a lease.


class Watch:
  """Looks at a run's directory, and changes nothing in it.

  Args:
    run_dir: Of the run; it need not be there yet.
    journal: Of the run: who has taken which epoch.
    lease_s: Where no heartbeat says another.
    now: See `clock_s`.

  Attributes:
    beat: The newest heartbeat; None without one.
    epoch: The newest that a syncer has taken.
    silent_s: For how long neither has moved.
    ended: The beat, once the run has ended while it was looked at.
  """

  def __init__(
    self,
    run_dir: pathlib.Path,
    journal: Journal,
    lease_s: float,
    now: Callable[[], float] = clock_s,
  ):
    self._run_dir = run_dir
    self._journal = journal
    self._lease_s = lease_s
    self._now = now
    self._looked: float | None = None
    self._fault = ""
    self.beat: Beat | None = None
    self.epoch = 0
    self.silent_s = 0.0
    self.ended: Beat | None = None

  @property
  def lease_s(self) -> float:
    """Of the syncer, whose promise to step down it is."""
    return self.beat.lease_s if self.beat else self._lease_s

  @property
  def pause_s(self) -> float:
    """How long to wait before the next look."""
    return self.lease_s / _LOOKS

  def look(self) -> None:
    """Looks once more; to be called again and again."""
    now = self._now()  # Before it is read: what is read is not older.
    gap = 0.0 if self._looked is None else now - self._looked
    self._looked = now
    self._fault = ""
    try:
      epoch, beat = self._journal.last_epoch(), read_beat(self._run_dir)
    except (OSError, ValueError) as error:
      self._fault, self.silent_s = str(error), 0.0
      return
    if beat and self.beat and beat.epoch < self.beat.epoch:
      beat = self.beat  # The last word of a syncer that was taken over from.
    if (epoch, beat) == (self.epoch, self.beat):
      self.silent_s += min(gap, 2 * self.pause_s)
      return
    if beat and beat.ended and self.beat and not self.beat.ended:
      self.ended = beat
    self.epoch, self.beat, self.silent_s = epoch, beat, 0.0

  def is_due(self) -> bool:
    """Whether its syncer has stepped down by now, if it lives."""
    return (
      self.beat is not None
      and not self.beat.ended
      and not self._fault
      and self.silent_s >= self.beat.lease_s
    )

  def sentence(self) -> str:
    """What it waits for."""
    where = f"stands by for the run in {self._run_dir}"
    if self._fault:
      return f"{where}, which cannot be looked at: {self._fault}"
    beat = self.beat
    if beat is None and self.epoch:
      return (
        f"{where}, whose syncer renews no heartbeat: it was started without"
        " run.standby_lease_s"
      )
    if beat is None:
      return f"{where}, which has not begun"
    if beat.ended:
      return f"{where}, which has ended: {beat.ended}"
    return (
      f"stands by for {beat.address or 'the syncer'} (epoch {beat.epoch},"
      f" counter {beat.counter}): {self.silent_s:.1f} s of {beat.lease_s:g} s"
      " without a move of it"
    )
