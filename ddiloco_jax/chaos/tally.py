"""What a simulated run came to: goodput, uptime, participation.

(arXiv 2604.21428, Sec. 5.)
"""

import itertools

from ddiloco_jax.chaos.job import Step
from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.state import State

WINDOW_S = 5.0  # Uptime is counted in windows of so many seconds.


class Tally:
  """Counts as the run goes.

  Args:
    duration_s: Of the run.
    num_jobs: Among which its chips are divided evenly.
  """

  def __init__(self, duration_s: float, num_jobs: int = 1):
    self._duration_s = duration_s
    self._useful_s = [0.0] * num_jobs
    # Per window, jobs that begin to step in it less those that ended before.
    self._edges = [0] * (int(duration_s / WINDOW_S) + 2)
    self.num_events = self.num_merges = self.num_steps = 0
    self.num_contributors = self.num_live = 0

  def note_step(self, n: int, step: Step) -> None:
    """Job n takes a step; what comes after the run's end does not count."""
    start_s, end_s, share = step
    end_s = min(end_s, self._duration_s)
    self.num_steps += 1
    self._useful_s[n] += share * (end_s - start_s)
    self._edges[int(start_s / WINDOW_S)] += 1
    self._edges[int(end_s / WINDOW_S) + 1] -= 1

  def note_merge(self, merge: events.Merge, state: State) -> None:
    self.num_merges += 1
    self.num_contributors += len(merge.inputs)
    self.num_live += state.num_live

  @property
  def goodput(self) -> float:
    """Share of allocated chip time that was spent in training steps."""
    return sum(self._useful_s) / (self._duration_s * len(self._useful_s))

  @property
  def goodput_by_job(self) -> list[float]:
    """The same of each job's chips."""
    return [useful_s / self._duration_s for useful_s in self._useful_s]

  @property
  def uptime(self) -> float:
    """Share of windows in which a step is completed, or under way."""
    num = max(1, int(self._duration_s / WINDOW_S))
    busy = itertools.accumulate(self._edges[:num])
    return sum(n > 0 for n in busy) / num

  def figures(self) -> dict[str, float]:
    """All of it, by name."""
    num = max(1, self.num_merges)
    return {
      "goodput": self.goodput,
      "uptime": self.uptime,
      "steps": self.num_steps,
      "merges": self.num_merges,
      "contributors_mean": self.num_contributors / num,
      "live_mean": self.num_live / num,
      "events": self.num_events,
    }
