"""How a process is admitted, refused, or recognised as one that reconnects.

A nonce names a process; another nonce of the same id fences the old process.
(arXiv 2604.21428, App. E.)
"""

from ddiloco_jax.protocol import (
  ending,
  events,
  ledger,
  membership,
  recovery,
  shards,
)
from ddiloco_jax.protocol.events import ZERO, Outcome, Version
from ddiloco_jax.protocol.state import Learner
from ddiloco_jax.protocol.turn import Turn


def join(turn: Turn, event: events.Joined) -> None:
  """Admits a process, or says why not."""
  refusal = _refusal(turn, event)
  if refusal is not None:
    _reject(turn, event, *refusal)
    return
  old = turn.learners.get(event.learner)
  if old is not None and _is_same(turn, old, event) and not old.gone:
    _reconnect(turn, event, old)
    return
  claimed = shards.claim(turn, event.learner)
  if isinstance(claimed, str):
    _reject(turn, event, "UNAVAILABLE", claimed)
  elif not claimed.reads:
    _reject(
      turn,
      event,
      "RESOURCE_EXHAUSTED",
      f"all {turn.rules.num_shards} data shards are held by live learners; "
      "raise num_shards at the syncer, or stop a learner",
    )
  else:
    _admit(turn, event, old, claimed)


def _reject(turn: Turn, event: events.Joined, code: str, reason: str) -> None:
  turn.count("rejected")
  turn.emit(
    events.Reject(
      learner=event.learner, nonce=event.nonce, code=code, reason=reason
    )
  )


def _refusal(turn: Turn, event: events.Joined) -> tuple[str, str] | None:
  old = turn.learners.get(event.learner)
  same = old is not None and _is_same(turn, old, event) and not old.gone
  if turn.end is not None and not same:
    word = "has finished" if turn.end.finished else "is ending"
    return "FAILED_PRECONDITION", (
      f"the run {word}: {turn.end.reason}; start a new run, or extend this "
      "one and start its syncer with --restore"
    )
  if old is not None and membership.is_fenced(old, event.nonce):
    return "ABORTED", (
      f"this process of {event.learner!r} was fenced: another one took its "
      f"place, or it was evicted; it does not join again"
    )
  if old is not None and not same and old.live and old.connected:
    if not event.takeover:
      return "FAILED_PRECONDITION", (
        f"learner id {event.learner!r} is live as incarnation "
        f"{old.incarnation} with an open stream; choose another --learner_id, "
        "or fence it with --takeover"
      )
  elif old is None or not old.live:
    most = turn.rules.max_learners
    if turn.num_live >= most:
      return "RESOURCE_EXHAUSTED", (
        f"{turn.num_live} learners are live and max_learners is {most}; "
        "raise max_learners at the syncer"
      )
    others = (m for m in turn.learners.values() if m is not old)
    awaited = sum(membership.is_awaited(turn, m) for m in others)
    if not same and turn.num_live + awaited >= most:
      return "UNAVAILABLE", (
        f"{turn.num_live} learners are live, {awaited} may come back after the "
        f"syncer's restart, and max_learners is {most}; join again"
      )
  return None


def _admit(
  turn: Turn,
  event: events.Joined,
  old: Learner | None,
  claimed: shards.Claim,
) -> None:
  nonces: tuple[str, ...] = ()
  evicted: tuple[str, ...] = ()
  if old is not None:
    nonces = membership.replaced(old, event.nonce)
    evicted = old.evicted_nonces
    membership.fence(turn, old, f"a new process of {event.learner} joined")
  shards.take(turn, event.learner, claimed)
  num = turn.rules.num_fragments
  incarnation = turn.next_incarnation
  turn.next_incarnation += 1
  learner = turn.put(
    Learner(
      learner=event.learner,
      nonce=event.nonce,
      incarnation=incarnation,
      shards=claimed.owned,
      reads=claimed.reads,
      joined_at=turn.now,
      heard_at=turn.now,
      # One that has trained before goes on from its own index.
      step=turn.t if _is_cumulative(turn) and not event.bases else 0,
      counts=(ZERO,) * num,
      bases=(None,) * num,
      adopted_at=(None,) * num,
      max_replies=max(1, event.max_replies),
      takes_shards=event.takes_shards,
      # One learner counts once for t to advance, whoever speaks for it.
      reported_t=-1 if old is None else old.reported_t,
      state_address=event.state_address,
      fenced_nonces=nonces,
      evicted_nonces=evicted,
    )
  )
  if event.learner not in turn.accounts:
    turn.own("accounts")[event.learner] = (ledger.Account(),) * num
  turn.has_joined = True
  membership.wake_scan(turn, turn.now + turn.rules.lease_s)
  _welcome(turn, learner, reconnect=False)
  _restate_bases(turn, learner, event.bases)


def _reconnect(turn: Turn, event: events.Joined, old: Learner) -> None:
  learner = turn.put(
    old._replace(
      nonce=event.nonce,
      connected=True,
      live=True,
      untimed=old.untimed or not old.live,
      heard_at=turn.now,
      max_replies=max(1, event.max_replies),
      state_address=event.state_address,
      takes_shards=event.takes_shards,
    )
  )
  turn.has_joined = True
  membership.wake_scan(turn, turn.now + turn.rules.lease_s)
  _welcome(turn, learner, reconnect=True)
  shards.tell(turn, learner, f"what {event.learner} reads")
  # Once a run has finished, its books are closed.
  if not (turn.end is not None and turn.end.finished):
    for adoption in membership.unknown_adoptions(learner, event.adoptions):
      membership.adopt(turn, turn.learners[learner.learner], *adoption)
    _restate_bases(turn, turn.learners[learner.learner], event.bases)
  learner = turn.learners[event.learner]
  for asked in learner.asked:
    if asked.moved_at is None:
      turn.emit(
        events.Pull(
          learner=learner.learner,
          incarnation=learner.incarnation,
          fragment=asked.fragment,
          round=asked.round,
          attempt=asked.attempt,
          reason=f"round {asked.round} has no answer of {learner.learner} yet",
        )
      )
  if turn.end is None:
    return
  turn.emit(events.Ending(reason=turn.end.reason))
  if turn.end.finished:
    turn.emit(ending.finished(turn.end))
  elif turn.end.exact:
    receiver = events.Receiver(
      learner.learner, learner.incarnation, Outcome.NOT_ASKED
    )
    for p in range(turn.rules.num_fragments):
      if p not in learner.exact:
        turn.publish_to(receiver, p, f"the last version of fragment {p}")


def _welcome(turn: Turn, learner: Learner, *, reconnect: bool) -> None:
  starts = turn.starts[-1]
  clocks = tuple(
    events.FragmentClock(
      version=fragment.version,
      n0=n0,
      merged_n=account.merged_n,
      merged_round=account.merged_round,
      merged_attempt=account.merged_attempt,
    )
    for fragment, n0, account in zip(
      turn.fragments, starts, turn.accounts[learner.learner]
    )
  )
  positions = shards.positions(turn, learner)
  names = ", ".join(str(position.shard) for position in positions)
  word = "reconnects" if reconnect else "joins"
  donor = None if reconnect else recovery.donor_for(turn, learner.learner)
  turn.emit(
    events.Welcome(
      learner=learner.learner,
      nonce=learner.nonce,
      incarnation=learner.incarnation,
      reconnect=reconnect,
      clocks=clocks,
      positions=positions,
      t=turn.t,
      donor=donor,
      reason=(
        f"{learner.learner} {word} as incarnation {learner.incarnation} with "
        f"data shard {names}; {turn.num_live} live"
      ),
    )
  )


def _restate_bases(
  turn: Turn, learner: Learner, bases: tuple[Version, ...]
) -> None:
  """Takes over the bases that a joining process says it trains from.

  Also those that a restart rolled back: its counts go on from them.
  """
  for p, base in enumerate(bases[: turn.rules.num_fragments]):
    if learner.bases[p] != base:
      membership.adopt(
        turn, turn.learners[learner.learner], p, base, None, ZERO
      )
    newest = turn.fragments[p].version
    if not membership.is_valid_base(turn, p, base):
      membership.replace_rolled_back(turn, learner, p, base)
    elif base.n < newest.n:
      turn.publish_to(
        events.Receiver(
          learner.learner, learner.incarnation, Outcome.NOT_ASKED
        ),
        p,
        f"fragment {p} is at version {newest.n} and {learner.learner} at "
        f"{base.n}",
      )


def _is_same(turn: Turn, old: Learner, event: events.Joined) -> bool:
  """Whether a process goes on as the one that is known.

  With its part of a snapshot only once: the next one that has it would train
  on the same data a second time. Nor where a restart has lost what was lent to
  it or given back: others train on that, too.
  """
  if not shards.knows(turn, old, event):
    return False
  if old.nonce == event.nonce:
    return True
  return old.nonce == event.resumes and not membership.is_fenced(old, old.nonce)


def _is_cumulative(turn: Turn) -> bool:
  return turn.rules.wait_for_publication or turn.rules.max_ahead > 0
