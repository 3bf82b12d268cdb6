"""One SPMD job on its share of a fleet: when its next step is, with how much.

It is looked at between two steps only: an interruption takes hold where the
step under way ends. Chips that stand still are not interrupted. (arXiv
2604.21428, Sec. 5.)
"""

import heapq
import itertools
from typing import NamedTuple

from ddiloco_jax.chaos.fleet import FleetConfig, Interruption, Interruptions
from ddiloco_jax.chaos.repair import RepairConfig


class Step(NamedTuple):
  """The next step of a job.

  Attributes:
    start_s, end_s: When.
    share: Of its chips that take part.
  """

  start_s: float
  end_s: float
  share: float


class Job:
  """Chips `first` to `last` of a fleet, both in [0, 1].

  Attributes:
    num_interrupted: Interruptions that stopped it.
    num_grown: Standstills only to take slices back.
  """

  def __init__(
    self, cfg: FleetConfig, first: float, last: float, *, elastic: bool
  ):
    self._cfg, self._elastic = cfg, elastic
    self._first, self._width = first, last - first
    slices = cfg.chips * self._width / cfg.slice_chips
    self._num_slices = max(1, round(slices))
    self._hits: list[Interruption] = []
    self._last = Step(0.0, 0.0, 1.0)
    self._away: dict[int, float] = {}  # Slice -> when it is back.
    self._returns: list[tuple[float, int]] = []  # A heap of the same.
    self._grown_at = float("-inf")
    self.num_interrupted = self.num_grown = 0

  def hit(self, interruption: Interruption) -> None:
    """Tells it of an interruption of one of its chips."""
    self._hits.append(interruption)

  def next_step(self, now: float, step_s: float) -> Step:
    """What it does from `now` on: maybe a standstill, then one step.

    Args:
      now: Not before its last step ended; every interruption until then was
        told, in any order with later ones.
      step_s: What the step takes.
    """
    started, ended, _ = self._last
    broken = [h for h in self._hits if started < h.at_s <= ended]
    self._hits = [h for h in self._hits if h.at_s > now]
    start = now
    if broken:
      self.num_interrupted += len(broken)
      start = self._stand(now, broken)
    elif self._may_grow(now):
      self.num_grown += 1
      start = self._grow(now)
    share = 1.0 - len(self._away) / self._num_slices
    self._last = Step(start, start + step_s, share)
    return self._last

  def _may_grow(self, now: float) -> bool:
    return (
      bool(self._returns)
      and self._returns[0][0] <= now
      and now >= self._grown_at + self._cfg.upscale_every_s
    )

  def _stand(self, now: float, broken: list[Interruption]) -> float:
    """Goes on without what broke, or with all of it repaired; says when."""
    cfg = self._cfg
    found = now + cfg.detection_s
    if not self._elastic:
      return found + max(h.repair_s for h in broken) + cfg.upscale_s
    for h in broken:
      self._lose(h, found)
    start = found + cfg.downscale_s
    if len(self._away) == self._num_slices:
      start = max(start, min(self._away.values()))
      return self._grow(start)
    self._take_back(start)
    return start

  def _lose(self, h: Interruption, found: float) -> None:
    part = (h.place - self._first) / self._width
    index = min(int(part * self._num_slices), self._num_slices - 1)
    back = found + h.repair_s
    self._away[index] = max(back, self._away.get(index, 0.0))
    heapq.heappush(self._returns, (self._away[index], index))

  def _grow(self, now: float) -> float:
    self._grown_at = now
    start = now + self._cfg.upscale_s
    self._take_back(start)
    return start

  def _take_back(self, start: float) -> None:
    """A reconfiguration that ends at `start` includes what is back by then."""
    while self._returns and self._returns[0][0] <= start:
      back, index = heapq.heappop(self._returns)
      if self._away.get(index) == back:
        del self._away[index]


class Fleet:
  """A fleet that is divided among jobs, which its interruptions hit."""

  def __init__(
    self,
    cfg: FleetConfig,
    law: RepairConfig,
    seed: int,
    num_jobs: int = 1,
    *,
    elastic: bool = True,
  ):
    edges = [n / num_jobs for n in range(num_jobs + 1)]
    self.jobs = tuple(
      Job(cfg, first, last, elastic=elastic)
      for first, last in itertools.pairwise(edges)
    )
    self._tape = Interruptions(cfg, law, seed)

  def next_step(self, n: int, now: float, step_s: float) -> Step:
    """The next step of job n; see `Job.next_step`."""
    num = len(self.jobs)
    for hit in self._tape.until(now):
      self.jobs[min(int(hit.place * num), num - 1)].hit(hit)
    return self.jobs[n].next_step(now, step_s)
