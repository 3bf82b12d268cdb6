"""Which replies may be merged: finite, fresh enough, and no outliers.

A guard never stops a healthy run: refusing everybody is an alarm, and starts
its median anew. (arXiv 2604.21428, Sec. 3.1; the guards are ours.)
"""

import math

from ddiloco_jax.protocol import (
  events,
  ledger,
  membership,
  possible,
  quorum,
)
from ddiloco_jax.protocol.state import FragmentState, Refusal, Reply, Round
from ddiloco_jax.protocol.turn import Turn

PATIENCE = 3  # Attempts that outliers may take the quorum from.


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


def _fault_of_norm(turn: Turn, event: events.Replied) -> tuple[str, str] | None:
  value, per_lr = quorum.scale(event.norm, event.counts, event.lr_sum)
  fragment = turn.fragments[event.fragment]
  known = fragment.scales_per_lr if per_lr else fragment.scales_per_step
  if len(known) < quorum.MIN_ACCEPTED:
    return None
  bound = quorum.outlier_of(value, known, turn.rules.outlier_factor)
  return None if bound is None else ("outlier", _outlier(value, per_lr, bound))


def _outlier(value: float, per_lr: bool, bound: float) -> str:
  unit = "unit of learning rate" if per_lr else "step"
  return f"its norm per {unit} is {value:.4g}, beyond the bound {bound:.4g}"


def outliers(turn: Turn, r: Round) -> list[tuple[Reply, str]]:
  """The replies of a round that are outliers when it is merged, and why.

  While too few were accepted for a running median, its others judge a reply,
  so that a hostile first one does not own the median. Afterwards the median
  does, once more: a carried reply may be older than it.
  """
  fragment, found = turn.fragments[r.fragment], []
  for reply in r.replies:
    factor = turn.rules.outlier_factor
    known = fragment.scales_per_lr if reply.per_lr else fragment.scales_per_step
    if len(known) < quorum.MIN_ACCEPTED:
      known = [
        other.scale
        for other in r.replies
        if other is not reply and other.per_lr == reply.per_lr
      ]
      if len(known) == 1:
        factor **= 2  # Of two replies, nobody knows which one is wrong.
    bound = quorum.outlier_of(reply.scale, known, factor)
    if bound is not None:
      found.append((reply, _outlier(reply.scale, reply.per_lr, bound)))
  return found


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
  per_lr = outliers[-1].per_lr
  seed = tuple(x.scale for x in (*r.replies, *outliers) if x.per_lr == per_lr)
  name = "scales_per_lr" if per_lr else "scales_per_step"
  fragment = turn.fragments[r.fragment]
  turn.put_fragment(r.fragment, fragment._replace(**{name: seed}))


def remember_scales(
  fragment: FragmentState, merged: tuple[Reply, ...]
) -> FragmentState:
  """Feeds the running medians with the norms that were merged."""
  rows = {True: fragment.scales_per_lr, False: fragment.scales_per_step}
  for reply in merged:
    if reply.weight > 0:
      rows[reply.per_lr] = (*rows[reply.per_lr], reply.scale)
  most = quorum.MAX_ACCEPTED
  return fragment._replace(
    scales_per_lr=rows[True][-most:],
    scales_per_step=rows[False][-most:],
  )
