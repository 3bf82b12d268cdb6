"""Which replies may be merged: finite, fresh enough, and no outliers.

A guard never stops a healthy run: refusing everybody is an alarm, and starts
its median anew. (arXiv 2604.21428, Sec. 3.1; the guards are ours.)
"""

import math
from collections.abc import Iterable

from ddiloco_jax.protocol import (
  events,
  ledger,
  membership,
  possible,
  quorum,
)
from ddiloco_jax.protocol.state import (
  FragmentState,
  Refusal,
  Reply,
  Round,
  Scale,
)
from ddiloco_jax.protocol.turn import Turn

PATIENCE = 3  # Attempts that outliers may take the quorum from.
YOUNG = 3  # Versions of a fragment until its steps rise slowly.


def fault_of(turn: Turn, event: events.Replied) -> tuple[str, str] | None:
  """Why a reply may not be merged: (kind, sentence), or None."""
  p, base = event.fragment, event.base
  newest = turn.fragments[p].version
  account = turn.account(event.learner, p)
  if impossible := possible.fault_of_reply(turn, event):
    return "counters", impossible
  if not math.isfinite(event.norm):
    return "not_finite", (
      f"the delta of fragment {p} has a norm of {event.norm}: an element is "
      "not finite; look for a diverged inner optimizer"
    )
  if not membership.is_valid_base(turn, p, base):
    return "rolled_back", (
      f"base {base.n} of epoch {base.epoch} is no version of fragment {p} "
      f"(the newest is {newest.n} of epoch {newest.epoch}); take the newest"
    )
  if base.n < account.merged_n:
    return "base_merged", (
      f"base {base.n} is older than version {account.merged_n}, into which "
      f"{event.learner} was merged already; take the newest"
    )
  own = turn.learners[event.learner].bases[p]
  if ledger.find(account, event.incarnation, base) is None and (
    own is not None
    and base.n < own.n
    and membership.is_valid_base(turn, p, own)
  ):
    return "base_replaced", (
      f"{event.learner} adopted version {own.n} of fragment {p} before it was "
      f"asked, and answers from {base.n}; drop the copy at an adoption"
    )
  return fault_of_age(turn, event.base, p) or _fault_of_norm(turn, event)


def fault_of_age(
  turn: Turn, base: events.Version, p: int
) -> tuple[str, str] | None:
  rules, newest = turn.rules, turn.fragments[p].version
  staleness = newest.n - base.n
  if staleness > rules.max_staleness:
    return "stale", (
      f"base {base.n} is {staleness} versions behind {newest.n} and the cap is "
      f"{rules.max_staleness}: its link is too slow; take the global fragment"
    )
  if staleness and rules.stale == "reject":
    return "stale", (
      f"base {base.n} is {staleness} versions behind {newest.n} and "
      "stale='reject'; take the global fragment"
    )
  return None


def scale_of(event: events.Replied) -> Scale:
  """Of a reply, from its norm and what it says of its steps."""
  is_told = event.lr_sum > 0 and math.isfinite(event.lr_sum)
  return Scale(
    per_step=event.norm / max(event.counts.steps, 1),
    per_lr=event.norm / event.lr_sum if is_told else None,
  )


def _fault_of_norm(turn: Turn, event: events.Replied) -> tuple[str, str] | None:
  scale, fragment = scale_of(event), turn.fragments[event.fragment]
  for name, factor in _measures(turn, event.fragment, scale).items():
    known = _known(fragment, name)
    if len(known) >= quorum.MIN_ACCEPTED:
      value = getattr(scale, name)
      bound = quorum.outlier_of(value, known, factor)
      if bound is not None:
        return "outlier", _outlier(value, name, bound)
  return None


def _measures(turn: Turn, p: int, scale: Scale) -> dict[str, float]:
  """Which norms of a reply are held against others', and with what factor."""
  factor = turn.rules.outlier_factor
  if scale.per_lr is None:
    return {"per_step": factor}
  # What a reply says of its learning rate explains much, and not everything: a
  # warm-up multiplies the steps of the first rounds by up to a cycle's.
  is_young = turn.fragments[p].version.n < YOUNG
  rise = turn.rules.cycle_steps if is_young else 1
  return {"per_lr": factor, "per_step": factor**2 * rise}


def _known(fragment: FragmentState, name: str) -> tuple[float, ...]:
  is_per_lr = name == "per_lr"
  return fragment.scales_per_lr if is_per_lr else fragment.scales_per_step


def _outlier(value: float, name: str, bound: float) -> str:
  unit = "unit of learning rate" if name == "per_lr" else "step"
  return f"its norm per {unit} is {value:.4g}, beyond the bound {bound:.4g}"


def outliers(turn: Turn, r: Round) -> list[tuple[Reply, str]]:
  """The replies of a round that are outliers when it is merged, and why.

  While too few were accepted for a running median, its others judge a reply,
  so that a hostile first one does not own the median. Afterwards the median
  does, once more: a carried reply may be older than it.
  """
  found: list[tuple[Reply, str]] = []
  # First by the norm alone: whoever lies of its learning rate judges nobody.
  for name in ("per_step", "per_lr"):
    rest = [x for x in r.replies if all(x is not out for out, _ in found)]
    for reply in rest:
      others = [x.scale for x in rest if x is not reply]
      if reason := _differs(turn, r.fragment, name, reply.scale, others):
        found.append((reply, reason))
  return found


def _differs(
  turn: Turn, p: int, name: str, scale: Scale, others: list[Scale]
) -> str:
  """How one measure of a reply of a round makes it an outlier, or ""."""
  factor = _measures(turn, p, scale).get(name)
  if factor is None:
    return ""
  known = _known(turn.fragments[p], name)
  if len(known) < quorum.MIN_ACCEPTED:
    known = _values(others, name)
    if len(known) == 1:
      factor **= 2  # Of two replies, nobody knows which one is wrong.
  value = getattr(scale, name)
  bound = quorum.outlier_of(value, known, factor)
  return "" if bound is None else _outlier(value, name, bound)


def _values(scales: Iterable[Scale], name: str) -> tuple[float, ...]:
  """One measure of those that have it."""
  values = (getattr(scale, name) for scale in scales)
  return tuple(value for value in values if value is not None)


def all_refused(turn: Turn, r: Round) -> None:
  """Every reply of a round was refused: an alarm, and never a standstill."""
  kinds = sorted({refusal.kind for refusal in r.refused})
  turn.alarm(
    "all_refused",
    f"round {r.round} of fragment {r.fragment}: all {len(r.refused)} replies "
    f"were refused ({', '.join(kinds)}): {r.refused[-1].reason}",
  )
  outliers = [refusal for refusal in r.refused if refusal.kind == "outlier"]
  if len(outliers) < r.quorum:
    return  # Fewer than could merge: one hostile learner would own the median.
  _start_median_anew(turn, r, outliers)


def starved(turn: Turn, r: Round) -> None:
  """Outliers took the quorum from one attempt after the other: an alarm.

  What differs that persistently is how these learners are. The median starts
  anew, with them.
  """
  outliers = [refusal for refusal in r.refused if refusal.kind == "outlier"]
  if r.attempt < PATIENCE or len(r.replies) + len(outliers) < r.quorum:
    return
  turn.alarm(
    "outliers_starve",
    f"round {r.round} of fragment {r.fragment}: attempt {r.attempt} is given up"
    f" for {len(outliers)} outliers: {outliers[-1].reason}; the median starts "
    "anew",
  )
  _start_median_anew(turn, r, outliers)


def _start_median_anew(turn: Turn, r: Round, outliers: list[Refusal]) -> None:
  """From the replies of a round, those that were outliers included."""
  scales = [x.scale for x in (*r.replies, *outliers) if x.scale]
  fragment = turn.fragments[r.fragment]
  turn.put_fragment(
    r.fragment,
    fragment._replace(
      scales_per_lr=_values(scales, "per_lr") or fragment.scales_per_lr,
      scales_per_step=_values(scales, "per_step"),
    ),
  )


def remember_scales(
  fragment: FragmentState, merged: tuple[Reply, ...]
) -> FragmentState:
  """Feeds the running medians with the norms that were merged."""
  scales = [reply.scale for reply in merged if reply.weight > 0]
  per_lr = (*fragment.scales_per_lr, *_values(scales, "per_lr"))
  per_step = (*fragment.scales_per_step, *_values(scales, "per_step"))
  return fragment._replace(
    scales_per_lr=per_lr[-quorum.MAX_ACCEPTED :],
    scales_per_step=per_step[-quorum.MAX_ACCEPTED :],
  )
