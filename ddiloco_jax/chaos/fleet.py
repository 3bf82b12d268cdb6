"""Which chips of a fleet are interrupted when: one tape for every system.

Chips are a rate, not objects: a million cost no more memory than one. A system
divides the fleet's chips among its jobs, so that the same interruption hits
each system where it has that chip. (arXiv 2604.21428, Sec. 5.)
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from ddiloco_jax.chaos import repair

DAY_S = 86_400.0
_CHUNK = 1024  # Draws at once.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
  """A fleet of chips, and what its interruptions cost.

  Attributes:
    chips: In all.
    mtbi_days: Mean time between interruptions of one chip.
    slice_chips: Chips that are lost together, and come back together.
    detection_s: From an interruption to its notice; nothing useful is done.
    downscale_s: To go on with the slices that are left.
    upscale_s: To go on with slices that came back; a job that is not elastic
      does so each time.
    upscale_every_s: Least time between two such growths; what comes back
      meanwhile waits, unless an interruption stops the job anyway.
  """

  chips: int = 1_200_000
  mtbi_days: float = 365.25
  slice_chips: int = 256
  detection_s: float = 5.0
  downscale_s: float = 14.0
  upscale_s: float = 13.0
  upscale_every_s: float = 140.0

  def __post_init__(self):
    for name, least in (("chips", 1), ("slice_chips", 1)):
      if getattr(self, name) < least:
        raise ValueError(
          f"fleet.{name} is {getattr(self, name)!r}: it must be at least"
          f" {least}."
        )
    if not self.mtbi_days > 0:
      raise ValueError(
        f"fleet.mtbi_days is {self.mtbi_days!r}: it must be above 0; inf for"
        " chips that are never interrupted."
      )
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name.endswith("_s") and not 0 <= value < float("inf"):
        raise ValueError(
          f"fleet.{field.name} is {value!r}: it must be at least 0 seconds,"
          " and finite."
        )

  @property
  def mtbf_s(self) -> float:
    """Mean time between interruptions of the whole fleet."""
    return self.mtbi_days * DAY_S / self.chips


class Interruption(NamedTuple):
  """One chip, and with it its slice.

  Attributes:
    at_s: When.
    place: Of the chip in the fleet, in [0, 1).
    repair_s: Until its slice is back.
  """

  at_s: float
  place: float
  repair_s: float


class Interruptions:
  """The tape of a fleet's interruptions, drawn as it is read.

  What each draw is for has a sequence of its own: a fleet with another law of
  repair is interrupted at the same times and places.
  """

  def __init__(self, cfg: FleetConfig, law: repair.RepairConfig, seed: int):
    self._cfg, self._law = cfg, law
    draws = np.random.SeedSequence(seed).spawn(3)
    self._gaps, self._places, self._repairs = map(np.random.default_rng, draws)
    self._drawn: list[Interruption] = []
    self._next = 0
    self._time_s = 0.0

  def until(self, time_s: float) -> list[Interruption]:
    """Those at or before a time that were not read yet, in order."""
    found = []
    while (head := self._peek()).at_s <= time_s:
      found.append(head)
      self._next += 1
    return found

  def _peek(self) -> Interruption:
    if self._next == len(self._drawn):
      self._draw()
    return self._drawn[self._next]

  def _draw(self) -> None:
    cfg = self._cfg
    gaps_s = self._gaps.exponential(cfg.mtbf_s, _CHUNK)
    times_s = self._time_s + np.cumsum(gaps_s)
    self._time_s = float(times_s[-1])
    repairs_s = repair.draw_s(self._law, self._repairs.random(_CHUNK))
    columns = (times_s, self._places.random(_CHUNK), repairs_s)
    self._drawn = [
      Interruption(*row) for row in zip(*(c.tolist() for c in columns))
    ]
    self._next = 0
