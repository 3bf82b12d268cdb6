"""Tells when a learner's training loss has left its course."""

import collections
import math
import statistics

NUM_BEFORE = 20  # Steps since the start, or the last spike, that make a course.
NUM_ABOVE = 3  # In a row: one hard batch is none.
_WINDOW = 100


class Spikes:
  """Looks at the loss of every step.

  Args:
    factor: A spike is this many times the running median; 0 for never.
  """

  def __init__(self, factor: float):
    self._factor = factor
    self._begin()

  def _begin(self) -> None:
    self._num = self._num_above = 0
    self._course: collections.deque[float] = collections.deque(maxlen=_WINDOW)

  def look(self, loss: float | None) -> str | None:
    """What is wrong with the course, with this step's loss; None if nothing.

    After that another course begins: no two spikes are less than NUM_BEFORE
    steps apart, whatever the data.
    """
    if not self._factor or loss is None:
      return None
    self._num += 1
    fault = self._fault(loss)
    if fault is None:
      self._course.append(loss)
    if fault is None or self._num <= NUM_BEFORE:
      self._num_above = 0
      return None
    self._num_above += 1
    if math.isfinite(loss) and self._num_above < NUM_ABOVE:
      return None
    self._begin()
    return fault

  def _fault(self, loss: float) -> str | None:
    if not math.isfinite(loss):
      return f"the loss is {loss}"
    if not self._course:
      return None
    median = statistics.median(self._course)
    if loss <= median + (self._factor - 1) * abs(median):
      return None
    return (
      f"the loss is {loss:.4g}, and {median:.4g} the median of the"
      f" {len(self._course)} steps before: more than {self._factor:g} times it"
      f" in {NUM_ABOVE} steps in a row (run.loss_spike_factor)"
    )
