"""Replies: which are taken, refused, late, carried, or seen before.

A reply is named by (learner, incarnation, fragment, round, attempt) and
resolved once. (arXiv 2604.21428, Sec. 3.1 and 3.2.)
"""

import math

from ddiloco_jax.protocol import events, ledger, membership, quorum
from ddiloco_jax.protocol.events import Outcome, ReplyKey
from ddiloco_jax.protocol.ledger import Answer
from ddiloco_jax.protocol.state import (
  Asked,
  FragmentState,
  Learner,
  Refusal,
  Reply,
  Round,
)
from ddiloco_jax.protocol.turn import Turn


def key_of(event: events.Replied) -> ReplyKey:
  return ReplyKey(
    event.learner, event.incarnation, event.fragment, event.round, event.attempt
  )


def replied(turn: Turn, event: events.Replied) -> None:
  """Resolves a whole reply: accepted, carried, duplicate, late or refused."""
  key = key_of(event)
  learner = turn.speaker(event)
  if learner is None or not 0 <= key.fragment < turn.rules.num_fragments:
    _answer_stranger(turn, key)
    return
  learner = membership.hear(turn, learner)
  account = turn.account(key.learner, key.fragment)
  name = (key.incarnation, key.round, key.attempt)
  for answer in account.answers:
    if answer[:3] == name:
      turn.count("duplicate")
      _resolve(
        turn,
        key,
        Outcome.DUPLICATE,
        f"seen before: {answer.outcome}. {answer.reason}",
        first=answer.outcome,
      )
      return
  asked = _find(learner, key)
  if asked is None:
    _answer_unasked(turn, event, key, name in account.asked)
    return
  others = tuple(a for a in learner.asked if a is not asked)
  turn.put(learner._replace(asked=others))
  _decide(turn, event, key, asked)
  turn.settle(key.learner, key.fragment)


def _find(learner: Learner, key: ReplyKey) -> Asked | None:
  for asked in learner.asked:
    if asked[:3] == (key.fragment, key.round, key.attempt):
      return asked
  return None


def _answer_stranger(turn: Turn, key: ReplyKey) -> None:
  turn.count("fenced")
  now = turn.learners.get(key.learner)
  newest = "unknown" if now is None else f"at incarnation {now.incarnation}"
  _resolve(
    turn,
    key,
    Outcome.REFUSED,
    f"fenced: incarnation {key.incarnation} of {key.learner!r} is over or was "
    f"never admitted (it is {newest}); join again",
  )


def _answer_unasked(
  turn: Turn, event: events.Replied, key: ReplyKey, was_asked: bool
) -> None:
  if was_asked:
    turn.count("late")
    outcome, book = Outcome.LATE, ledger.LATE
    reason = f"round {key.round} of fragment {key.fragment} is closed"
  else:
    turn.count("not_asked")
    outcome, book = Outcome.REFUSED, ledger.refused_book("not_asked")
    reason = (
      f"not asked: no pull of fragment {key.fragment} in round {key.round} "
      f"attempt {key.attempt} was sent to {key.learner}; answer pulls only"
    )
  account = turn.account(key.learner, key.fragment)
  account = ledger.lose(
    account, key.incarnation, event.base, event.counts, book
  )
  if was_asked:
    account = ledger.told(
      account,
      Answer(key.incarnation, key.round, key.attempt, outcome, reason),
    )
  turn.put_account(key.learner, key.fragment, account)
  _resolve(turn, key, outcome, reason)


def _decide(
  turn: Turn, event: events.Replied, key: ReplyKey, asked: Asked
) -> None:
  """Judges a reply that was asked for, and takes it or refuses it."""
  r = turn.round_of(key.fragment)
  if r is not None and r.round == key.round and r.attempt == key.attempt:
    member = (key.learner, key.incarnation)
    waiting = tuple(w for w in r.waiting if w != member)
    fresh = r._replace(waiting=waiting)
    turn.put_round(r, fresh)
    r = fresh
  fault = _fault(turn, event)
  if fault is not None:
    kind, reason = fault
    _refuse(turn, event, key, kind, reason, r)
    return
  value, per_lr = quorum.scale(event.norm, event.counts, event.lr_sum)
  reply = Reply(
    key,
    event.base,
    event.counts,
    quorum.weight(event.counts),
    value,
    per_lr,
    turn.now,
  )
  outcome = Outcome.CARRIED if asked.carried else Outcome.ACCEPTED
  staleness = turn.fragments[key.fragment].version.n - event.base.n
  reason = (
    f"{outcome} for round {key.round} of fragment {key.fragment}: "
    f"{event.counts.steps} steps, {event.counts.tokens} tokens, staleness "
    f"{staleness}, weight {reply.weight:g}"
  )
  account = turn.account(key.learner, key.fragment)
  if ledger.find(account, key.incarnation, event.base) is None:
    # Its `applied` is still on the way: the control stream is another one.
    account = ledger.begin(account, key.incarnation, event.base)
  account = ledger.cover(account, key, event.base, event.counts)
  answer = Answer(key.incarnation, key.round, key.attempt, outcome, reason)
  turn.put_account(key.learner, key.fragment, ledger.told(account, answer))
  for shard, batch in event.positions:
    if batch > turn.accepted.get(shard, 0):
      turn.own("accepted")[shard] = batch
  _resolve(turn, key, outcome, reason)
  if r is not None and not r.merging:
    _enter(turn, r, reply)
  else:
    turn.carried = (*turn.carried, reply)


def _fault(turn: Turn, event: events.Replied) -> tuple[str, str] | None:
  """Why a reply may not be merged: (kind, sentence), or None."""
  p, base = event.fragment, event.base
  newest = turn.fragments[p].version
  account = turn.account(event.learner, p)
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
    own is not None and base.n < own.n
  ):
    return "base_replaced", (
      f"{event.learner} adopted version {own.n} of fragment {p} before it was "
      f"asked, and answers from {base.n}; drop the copy at an adoption"
    )
  return _fault_of_age(turn, event.base, p) or _fault_of_norm(turn, event)


def _fault_of_age(
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


def _refuse(
  turn: Turn,
  event: events.Replied,
  key: ReplyKey,
  kind: str,
  reason: str,
  r: Round | None,
) -> None:
  turn.count(f"refused/{kind}")
  account = turn.account(key.learner, key.fragment)
  account = ledger.lose(
    account,
    key.incarnation,
    event.base,
    event.counts,
    ledger.refused_book(kind),
  )
  answer = Answer(
    key.incarnation, key.round, key.attempt, Outcome.REFUSED, reason
  )
  turn.put_account(key.learner, key.fragment, ledger.told(account, answer))
  if r is not None:
    value, per_lr = quorum.scale(event.norm, event.counts, event.lr_sum)
    refusal = Refusal(
      key, kind, reason, value if kind == "outlier" else 0.0, per_lr
    )
    turn.put_round(r, r._replace(refused=(*r.refused, refusal)))
  _resolve(turn, key, Outcome.REFUSED, f"{kind}: {reason}")
  if kind in ("stale", "rolled_back", "base_merged"):
    turn.publish_to(
      events.Receiver(
        key.learner,
        key.incarnation,
        Outcome.REFUSED,
        reason,
        key.round,
        key.attempt,
      ),
      key.fragment,
      f"{key.learner} is to take the global fragment {key.fragment}: {reason}",
    )


def _resolve(
  turn: Turn,
  key: ReplyKey,
  outcome: Outcome,
  reason: str,
  first: Outcome | None = None,
) -> None:
  turn.emit(
    events.Resolved(key=key, outcome=outcome, reason=reason, first=first)
  )


def _enter(turn: Turn, r: Round, reply: Reply) -> None:
  """Adds a reply to an open round; the K-th one starts the grace window."""
  fresh = r._replace(replies=(*r.replies, reply))
  if (
    r.quorum_at is None
    and len(fresh.replies) >= r.quorum
    and any(other.weight > 0 for other in fresh.replies)
  ):
    if not r.flush:
      turn.sample("quorum_s", turn.now - r.opened_at)
    grace_s = quorum.grace_s(
      turn.rules, turn.step_s, turn.quorum_s, turn.sync_s
    )
    fresh = fresh._replace(quorum_at=turn.now, grace_end=turn.now + grace_s)
  turn.put_round(r, fresh)


def take_carried(turn: Turn, fragment: int) -> None:
  """Enters the carried replies of a fragment into the round just opened."""
  mine = tuple(c for c in turn.carried if c.key.fragment == fragment)
  if not mine:
    return
  turn.carried = tuple(c for c in turn.carried if c.key.fragment != fragment)
  for reply in mine:
    fault = _fault_of_age(turn, reply.base, fragment)
    merged_n = turn.account(reply.key.learner, fragment).merged_n
    if fault is None and reply.base.n < merged_n:
      fault = "base_merged", f"{reply.base.n} is older than {merged_n}"
    r = turn.round_of(fragment)
    assert r is not None
    if fault is None:
      _enter(turn, r, reply)
      continue
    kind, reason = fault
    turn.count(f"refused/{kind}")
    drop(turn, reply, ledger.refused_book(kind), reason)
    refusal = Refusal(reply.key, kind, reason, 0.0, reply.per_lr)
    turn.put_round(r, r._replace(refused=(*r.refused, refusal)))


def drop(turn: Turn, reply: Reply, book: str, reason: str) -> None:
  """An accepted reply will not be merged after all."""
  account = turn.account(reply.key.learner, reply.key.fragment)
  account = ledger.uncover(account, reply.key, book)
  turn.put_account(reply.key.learner, reply.key.fragment, account)
  turn.settle(reply.key.learner, reply.key.fragment)
  turn.emit(events.Free(key=reply.key, reason=reason))


def judge_together(turn: Turn, r: Round) -> tuple[Reply, ...]:
  """The replies of a round that its others do not show to be outliers.

  Only while too few were accepted for a running median; a hostile first reply
  then does not own it.
  """
  fragment = turn.fragments[r.fragment]
  kept = []
  for reply in r.replies:
    known = fragment.scales_per_lr if reply.per_lr else fragment.scales_per_step
    others = [
      other.scale
      for other in r.replies
      if other is not reply and other.per_lr == reply.per_lr
    ]
    bound = None
    if len(known) < quorum.MIN_ACCEPTED:
      bound = quorum.outlier_of(reply.scale, others, turn.rules.outlier_factor)
    if bound is None:
      kept.append(reply)
      continue
    reason = _outlier(reply.scale, reply.per_lr, bound)
    turn.count("refused/outlier")
    drop(turn, reply, ledger.refused_book("outlier"), f"outlier: {reason}")
    refusal = Refusal(reply.key, "outlier", reason, reply.scale, reply.per_lr)
    now = turn.round_of(r.fragment)
    assert now is not None
    turn.put_round(now, now._replace(refused=(*now.refused, refusal)))
  return tuple(kept)


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
  per_lr = outliers[-1].per_lr
  seed = tuple(o.scale for o in outliers if o.per_lr == per_lr)
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


def pushing(turn: Turn, event: events.Pushing) -> None:
  """Bytes of a reply arrived: a round waits longer for it."""
  learner = turn.speaker(event)
  if learner is None:
    turn.count("fenced")
    return
  learner = membership.hear(turn, learner)
  for asked in learner.asked:
    if asked[:3] != (event.fragment, event.round, event.attempt):
      continue
    if asked.moved_at is not None and event.num_bytes <= asked.num_bytes:
      return
    fresh = asked._replace(moved_at=turn.now, num_bytes=event.num_bytes)
    _put_asked(turn, learner, asked, fresh)
    if asked.carried:
      watch_carried(turn, fresh)
      return
    r = turn.round_of(event.fragment)
    if r is not None and not r.merging and r.round == event.round:
      deadline = max(r.deadline, turn.now + turn.deadline_s())
      turn.put_round(r, r._replace(deadline=deadline))


def push_broken(turn: Turn, event: events.PushBroken) -> None:
  """An upload ended early; a carried one that does not resume is over."""
  learner = turn.speaker(event)
  if learner is None:
    return
  turn.count("push_broken")
  learner = membership.hear(turn, learner)
  for asked in learner.asked:
    if asked[:3] == (event.fragment, event.round, event.attempt):
      fresh = asked
      if not asked.carried:
        fresh = asked._replace(moved_at=None, num_bytes=0)
      _put_asked(turn, learner, asked, fresh)


def _put_asked(
  turn: Turn, learner: Learner, old: Asked, new: Asked | None
) -> None:
  asked = tuple(
    kept
    for kept in (new if a is old else a for a in learner.asked)
    if kept is not None
  )
  turn.put(learner._replace(asked=asked))


def watch_carried(turn: Turn, asked: Asked) -> None:
  """Looks at a carried upload again when it would have stalled."""
  at = (asked.moved_at or turn.now) + turn.deadline_s()
  if turn.carried_check_at is None or at < turn.carried_check_at:
    turn.carried_check_at = at


def expire_carried(turn: Turn) -> None:
  """Stops waiting for carried uploads whose bytes no longer move."""
  if turn.carried_check_at is None or turn.now < turn.carried_check_at:
    return
  turn.carried_check_at = None
  for learner in tuple(turn.learners.values()):
    for asked in learner.asked:
      if not asked.carried:
        continue
      if turn.now - (asked.moved_at or 0.0) < turn.deadline_s():
        watch_carried(turn, asked)
        continue
      turn.count("carry_expired")
      _put_asked(turn, turn.learners[learner.learner], asked, None)
      turn.settle(learner.learner, asked.fragment)
