"""What a learner counts: steps and tokens per fragment, and its schedule's index.

(arXiv 2604.21428, Sec. 3.2 and App. E.)
"""

from ddiloco_jax.algorithm.fragments import Fragment
from ddiloco_jax.protocol import events


class Anchor:
  """What one fragment trains from, and what was done since its adoption."""

  __slots__ = ("base", "counts", "lr_sum", "version")

  def __init__(self, base: Fragment, version: events.Version):
    self.base = base
    self.version = version
    self.counts = events.Counts()
    self.lr_sum = 0.0

  def add(self, tokens: int, lr: float) -> None:
    steps, so_far = self.counts
    self.counts = events.Counts(steps + 1, so_far + tokens)
    self.lr_sum += lr


class ScheduleIndex:
  """Indexes the inner learning rate by the syncer's step, as it is known here.

  That is the last stamp seen plus own steps since, the latter at most H, so
  that a learner without a syncer stays where the others are; it never falls.
  """

  def __init__(self, cycle_steps: int):
    self._cycle_steps = cycle_steps
    self._index = 0
    self._seen_t = 0
    self._num_since = 0

  def save(self) -> tuple[int, ...]:
    """All that `restore` needs."""
    return self._index, self._seen_t, self._num_since

  def restore(self, saved: tuple[int, ...]) -> None:
    """Goes on from where another one was saved."""
    self._index, self._seen_t, self._num_since = saved

  def next(self, t: int) -> int:
    """The index of the next own step, given the newest stamp."""
    self._num_since = 0 if t != self._seen_t else self._num_since + 1
    self._seen_t = t
    ahead = min(self._num_since, self._cycle_steps)
    self._index = max(self._index, t + ahead)
    return self._index
