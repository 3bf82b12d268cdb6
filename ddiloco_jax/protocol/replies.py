"""Replies: taken, refused, late, carried, or seen before.

A reply is named by (learner, incarnation, fragment, round, attempt) and is
resolved once. (arXiv 2604.21428, Sec. 3.1 and 3.2.)
"""

from ddiloco_jax.protocol import (
  events,
  guards,
  ledger,
  membership,
  possible,
  quorum,
)
from ddiloco_jax.protocol.events import Counts, Outcome, ReplyKey
from ddiloco_jax.protocol.ledger import Answer
from ddiloco_jax.protocol.state import Asked, Learner, Refusal, Reply, Round
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
    _answer_unasked(turn, event, key, was_asked=name in account.asked)
    return
  others = tuple(a for a in learner.asked if a is not asked)
  turn.put(learner._replace(asked=others))
  _decide(turn, event, learner, asked)
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
    f"never admitted (it is {newest}); join, unless this process was fenced",
  )


def _answer_unasked(
  turn: Turn, event: events.Replied, key: ReplyKey, *, was_asked: bool
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
    account, key.incarnation, event.base, _lost(turn, event), book
  )
  if was_asked:
    account = ledger.told(
      account,
      Answer(key.incarnation, key.round, key.attempt, outcome, reason),
    )
  turn.put_account(key.learner, key.fragment, account)
  _resolve(turn, key, outcome, reason)


def _decide(
  turn: Turn, event: events.Replied, learner: Learner, asked: Asked
) -> None:
  """Judges a reply that was asked for, and takes it or refuses it."""
  key = key_of(event)
  r = turn.round_of(key.fragment)
  if r is not None and r.round == key.round and r.attempt == key.attempt:
    member = (key.learner, key.incarnation)
    waiting = tuple(w for w in r.waiting if w != member)
    fresh = r._replace(waiting=waiting)
    turn.put_round(r, fresh)
    r = fresh
  fault = guards.fault_of(turn, event)
  if fault is not None:
    kind, reason = fault
    _refuse(turn, event, key, kind, reason, r)
    return
  reply = Reply(
    key,
    event.base,
    event.counts,
    quorum.weight(event.counts),
    guards.scale_of(event),
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
    if shard in learner.reads and batch > turn.accepted.get(shard, 0):
      turn.own("accepted")[shard] = batch
  _resolve(turn, key, outcome, reason)
  if r is not None and not r.merging:
    _enter(turn, r, reply)
  else:
    turn.carried = (*turn.carried, reply)


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
    _lost(turn, event),
    ledger.refused_book(kind),
  )
  answer = Answer(
    key.incarnation, key.round, key.attempt, Outcome.REFUSED, reason
  )
  turn.put_account(key.learner, key.fragment, ledger.told(account, answer))
  if r is not None:
    scale = guards.scale_of(event) if kind == "outlier" else None
    refusal = Refusal(key, kind, reason, scale)
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


def _lost(turn: Turn, event: events.Replied) -> Counts:
  """What a reply that is not taken covers: nothing that cannot be."""
  if possible.fault_of_reply(turn, event) is None:
    return event.counts
  return ledger.smaller(event.counts, possible.known(turn, event))


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
    fault = guards.fault_of_age(turn, reply.base, fragment)
    r = turn.round_of(fragment)
    assert r is not None
    if fault is None:
      _enter(turn, r, reply)
      continue
    kind, reason = fault
    turn.count(f"refused/{kind}")
    drop(turn, reply, ledger.refused_book(kind), reason)
    refusal = Refusal(reply.key, kind, reason, None)
    turn.put_round(r, r._replace(refused=(*r.refused, refusal)))


def drop(turn: Turn, reply: Reply, book: str, reason: str) -> None:
  """An accepted reply will not be merged after all."""
  account = turn.account(reply.key.learner, reply.key.fragment)
  account = ledger.uncover(account, reply.key, book)
  turn.put_account(reply.key.learner, reply.key.fragment, account)
  turn.settle(reply.key.learner, reply.key.fragment)
  turn.emit(events.Free(key=reply.key, reason=reason))


def refuse_outliers(turn: Turn, r: Round) -> Round:
  """Takes out of a round what its other replies show to be outliers.

  The quorum may be lost by it; the round then goes on collecting.
  """
  for reply, reason in guards.outliers(turn, r):
    turn.count("refused/outlier")
    drop(turn, reply, ledger.refused_book("outlier"), f"outlier: {reason}")
    refusal = Refusal(reply.key, "outlier", reason, reply.scale)
    fresh = r._replace(
      replies=tuple(kept for kept in r.replies if kept is not reply),
      refused=(*r.refused, refusal),
    )
    turn.put_round(r, fresh)
    r = fresh
  if len(r.replies) < r.quorum or not any(x.weight > 0 for x in r.replies):
    fresh = r._replace(quorum_at=None, grace_end=None)
    turn.put_round(r, fresh)
    r = fresh
  return r
