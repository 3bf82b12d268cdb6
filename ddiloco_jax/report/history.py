"""What happened in a run, as plain values; everything drawn is drawn from it.

Times are seconds since the run began, on the syncer's clock: no two hosts'
clocks are ever compared. A restored syncer's clock goes on from its checkpoint,
so the time without a syncer is no part of the run.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

WINDOW_S = 5.0  # Uptime is counted in windows of so many seconds.


class Progress(NamedTuple):
  """A learner said so: `step` steps of this life are done."""

  time_s: float
  step: int
  loss: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Life:
  """One process of one learner, from its welcome to its end.

  Attributes:
    learner: Its id.
    incarnation: Which of its processes.
    start_s: When it was welcomed.
    end_s: When it was last heard, or when it said goodbye.
    end: "left", "lost" (its stream or lease ended), or "run" (the run ended,
      or goes on).
    progress: Its reports, in order.
  """

  learner: str
  incarnation: int
  start_s: float
  end_s: float
  end: str
  progress: tuple[Progress, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
  """One merge of one fragment."""

  time_s: float
  t: int
  fragment: int
  n: int
  contributors: tuple[tuple[str, int], ...]  # (learner, incarnation)
  num_live: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
  """A whole run, over all its epochs.

  Attributes:
    run_id: As the tape says.
    cycle_steps: The configured H.
    end_s: When training ended (the flush comes after).
    lives: By learner, then by incarnation.
    merges: In order; each version once, and none that was rolled back.
    realised_h: Per fragment; None where no merge says.
    books: Tokens by book: reported, merged, pending, discarded/REASON; means
      over fragments weighted by parameters.
    counters: Slots missed, rounds given up and the like.
    ending: Why the run ended; "" if its tape just stops.
  """

  run_id: str
  cycle_steps: int
  end_s: float
  lives: tuple[Life, ...]
  merges: tuple[Merge, ...]
  realised_h: tuple[float | None, ...]
  books: Mapping[str, float]
  counters: Mapping[str, int] = dataclasses.field(default_factory=dict)
  ending: str = ""


def uptime(history: History) -> float | None:
  """Share of 5 s windows in which at least one learner completes a step.

  Counted from the first step on; where steps are longer than a window, one
  under way counts. A last, shorter window is left out unless it is the only
  one.

  Returns:
    A share in 0..1; None if no step was ever completed.
  """
  return share_of_windows([x.progress for x in history.lives], history.end_s)


def share_of_windows(
  lives: Iterable[tuple[Progress, ...]],
  end_s: float,
  first_s: float | None = None,
) -> float | None:
  """Uptime from the reports of each life; see `uptime`.

  Args:
    lives: The reports of each process, in order.
    end_s: Where the last window ends.
    first_s: Where the first begins; the first step if not given.
  """
  spans = [span for progress in lives for span in _stepping_spans(progress)]
  if not spans:
    return None
  first = min(end for _, end in spans) if first_s is None else first_s
  num = max(1, int((end_s - first) / WINDOW_S))
  up = [False] * num
  for start, end in spans:
    low = max(0, math.floor((start - first) / WINDOW_S))
    for window in range(low, math.floor((end - first) / WINDOW_S) + 1):
      if window < num:
        up[window] = True
  return sum(up) / num


def _stepping_spans(
  progress: tuple[Progress, ...],
) -> list[tuple[float, float]]:
  """The spans in which a life was busy stepping.

  Reports are coalesced: one may cover several steps, which then lie evenly
  between it and the one before. A gap that is long for a step of this learner
  is a pause, and only its last step is known to lie at its end.
  """
  steps: list[Progress] = []
  for report in progress:
    if report.step > (steps[-1].step if steps else 0):
      steps.append(report)
  if not steps:
    return []
  pairs = list(itertools.pairwise(steps))
  each = [(b.time_s - a.time_s) / (b.step - a.step) for a, b in pairs]
  longest_s = max(WINDOW_S, 2 * statistics.median(each)) if each else WINDOW_S
  spans = [(steps[0].time_s, steps[0].time_s)]
  for (a, b), step_s in zip(pairs, each):
    is_busy = step_s <= longest_s
    spans.append((a.time_s if is_busy else b.time_s, b.time_s))
  return spans


def contributors_median(history: History) -> float | None:
  """Learners in the median merge."""
  return _median([len(set(m.contributors)) for m in history.merges])


def learners_live_median(history: History) -> float | None:
  """Learners live at the median merge."""
  return _median([m.num_live for m in history.merges])


def merges_by_learner(history: History) -> dict[str, int]:
  """How many merges each learner was part of, over all its lives."""
  counts = {life.learner: 0 for life in history.lives}
  for merge in history.merges:
    for learner in {learner for learner, _ in merge.contributors}:
      counts[learner] = counts.get(learner, 0) + 1
  return counts


def merges_after_return(history: History) -> dict[str, int]:
  """Merges of each learner that came back, in lives after its first."""
  first: dict[str, int] = {}
  for life in history.lives:
    first[life.learner] = min(
      life.incarnation, first.get(life.learner, life.incarnation)
    )
  lives = [(life.learner, life.incarnation) for life in history.lives]
  returned = {who for who, n in lives if n > first[who]}
  counts = dict.fromkeys(sorted(returned), 0)
  for merge in history.merges:
    for who, incarnation in set(merge.contributors):
      if who in counts and incarnation > first[who]:
        counts[who] += 1
  return counts


def steps_by_learner(history: History) -> dict[str, int]:
  """Steps reported by each learner, over all its lives."""
  counts: dict[str, int] = {}
  for life in history.lives:
    steps = max((p.step for p in life.progress), default=0)
    counts[life.learner] = counts.get(life.learner, 0) + steps
  return counts


def _median(values: list[int]) -> float | None:
  return float(statistics.median(values)) if values else None
