"""The faults of a storm, on the clock of the run that they were done to.

faults.jsonl has the storm's clock; the run's own stands still while no syncer
runs, so all that happens meanwhile lies at one moment of it.
"""

import bisect
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from ddiloco_jax.report.ordeal import Line, read_lines

FILE = "faults.jsonl"
SYNCER = "syncer"


class Mark(NamedTuple):
  """One fault of one process, from its begin to its end."""

  process: str  # A learner's id, or SYNCER.
  kind: str
  start_s: float
  end_s: float


def read_marks(run_dir: pathlib.Path) -> tuple[Mark, ...]:
  """The faults that were done in a run, in order.

  Returns:
    None where there was no storm, or one that was ended before it said how far
    the two clocks are apart.

  Raises:
    ValueError: faults.jsonl is damaged.
  """
  if not (run_dir / FILE).exists():
    return ()
  lines = read_lines(run_dir / FILE)
  clock = _Clock(lines)
  if not clock.is_known:
    return ()
  return tuple(
    Mark(
      line.values["process"].removeprefix("learner-"),
      line.values["fault"]["kind"],
      clock.of_run(line.at_s),
      clock.of_run(_end_s(lines[n + 1 :], line)),
    )
    for n, line in enumerate(lines)
    if line.what == "fault" and line.values["done"]
  )


def _end_s(later: Sequence[Line], fault: Line) -> float:
  """When it was over: healed, or the killed process started again."""
  process = fault.values["process"]
  is_kill = fault.values["fault"]["kind"] == "kill"
  over = "start" if is_kill else "fault_over"
  for line in later:
    if line.what == over and line.values["process"] == process:
      return line.at_s
  return fault.at_s + fault.values["fault"]["lasts_s"]


class _Clock:
  """Tells the run's time at a time of the storm."""

  def __init__(self, lines: Sequence[Line]):
    offsets = {
      line.values["epoch"]: line.values["offset_s"]
      for line in lines
      if line.what == "clock"
    }
    silent = {
      line.values["epoch"]: line.at_s for line in lines if line.what == "silent"
    }
    epochs = [
      (line.at_s, line.values["epoch"])
      for line in lines
      if line.what == "listening" and line.values["epoch"] in offsets
    ]
    self.is_known = bool(epochs)
    self._begins = [at_s for at_s, _ in epochs]
    self._spans = [
      (offsets[epoch], silent.get(epoch, float("inf"))) for _, epoch in epochs
    ]

  def of_run(self, at_s: float) -> float:
    n = max(0, bisect.bisect_right(self._begins, at_s) - 1)
    offset_s, silent_s = self._spans[n]
    return min(at_s, silent_s) - offset_s
