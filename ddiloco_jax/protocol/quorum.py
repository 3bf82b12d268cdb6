"""How much a reply weighs, how long a quorum waits, which norm is an outlier.

Pure formulas. (arXiv 2604.21428, Sec. 3.2 and Eq. 3.)
"""

from collections.abc import Sequence

from ddiloco_jax.protocol.events import Counts
from ddiloco_jax.protocol.rules import Rules

# A running median of fewer accepted replies is not yet trusted to judge.
MIN_ACCEPTED = 8
# Of so many newest accepted replies the running median is taken: enough to
# outvote a few hostile ones, few enough to follow a schedule.
MAX_ACCEPTED = 33


def weight(counts: Counts) -> float:
  """Quantity times quality, c_tokens * (c_tokens / c_steps); 0 if either is 0.

  >>> weight(Counts(steps=10, tokens=100))
  1000.0
  """
  steps, tokens = counts
  if steps <= 0 or tokens <= 0:
    return 0.0
  return float(tokens) * (float(tokens) / float(steps))


def grace_s(
  rules: Rules,
  step_s: float | None,
  quorum_s: float | None,
  sync_s: float | None,
) -> float:
  """The adaptive grace window (Eq. 3), seconds; 0 without an estimate.

  Args:
    rules: tau and gamma are taken from it.
    step_s: A step of the median training learner.
    quorum_s: From the opening of a round to its K-th reply.
    sync_s: From the last reply to the adoption by the median learner.
  """
  if step_s is None or quorum_s is None or sync_s is None:
    return 0.0
  slack = rules.max_open_rounds * step_s - (quorum_s + sync_s)
  return min(rules.grace_fraction * max(0.0, slack), step_s)


def average(old: float | None, sample: float, sample_weight: float) -> float:
  """An exponential moving average; the first sample is taken whole."""
  if old is None:
    return sample
  return old + sample_weight * (sample - old)


def median(ordered: Sequence[float]) -> float:
  """The median of sorted values; of an even number, the smaller middle one."""
  return ordered[(len(ordered) - 1) // 2]


def outlier_of(
  value: float, others: Sequence[float], factor: float
) -> float | None:
  """The bound that `value` is beyond, or None where it is no outlier."""
  if not others:
    return None
  bound = factor * median(sorted(others))
  return bound if bound > 0 and value > bound else None
