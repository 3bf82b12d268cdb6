"""Who takes part: incarnations, leases, shards, and the vector clock.

Liveness is any byte within the lease; a new nonce is a new process, which
fences the old one. (arXiv 2604.21428, Sec. 3.1 and App. E.)
"""

from ddiloco_jax.protocol import events, ledger
from ddiloco_jax.protocol.events import ZERO, Counts, Outcome, Version
from ddiloco_jax.protocol.state import Learner, State
from ddiloco_jax.protocol.turn import Turn

# A learner without a new step for longer than this, or ten steps, is not
# training: long enough for a compilation or a checkpoint.
TRAINING_S = 60.0


def is_valid_base(state: State | Turn, fragment: int, base: Version) -> bool:
  """Whether a base has the bytes that its version has in this epoch."""
  if base.epoch == state.epoch:
    return 0 <= base.n <= state.fragments[fragment].version.n
  if not 1 <= base.epoch < state.epoch:
    return False
  later = state.starts[base.epoch :]
  return 0 <= base.n <= min(start[fragment] for start in later)


def join(turn: Turn, event: events.Joined) -> None:
  """Admits a process, or says why not."""
  refusal = _refusal(turn, event)
  if refusal is not None:
    code, reason = refusal
    turn.count("rejected")
    turn.emit(
      events.Reject(
        learner=event.learner, nonce=event.nonce, code=code, reason=reason
      )
    )
    return
  old = turn.learners.get(event.learner)
  if old is not None and old.nonce == event.nonce and not old.gone:
    _reconnect(turn, event, old)
    return
  shard = _shard(turn, event.learner)
  if shard is None:
    turn.count("rejected")
    turn.emit(
      events.Reject(
        learner=event.learner,
        nonce=event.nonce,
        code="RESOURCE_EXHAUSTED",
        reason=(
          f"all {turn.rules.num_shards} data shards are held by live "
          "learners; raise num_shards at the syncer, or stop a learner"
        ),
      )
    )
    return
  _admit(turn, event, old, shard)


def _refusal(turn: Turn, event: events.Joined) -> tuple[str, str] | None:
  old = turn.learners.get(event.learner)
  same = old is not None and old.nonce == event.nonce and not old.gone
  if turn.end is not None and (turn.end.finished or not same):
    word = "has finished" if turn.end.finished else "is ending"
    return "FAILED_PRECONDITION", (
      f"the run {word}: {turn.end.reason}; start a new run, or extend this "
      "one and start its syncer with --restore"
    )
  if old is not None and event.nonce in old.fenced_nonces:
    return "ABORTED", (
      f"this process of {event.learner!r} was fenced: incarnation "
      f"{old.incarnation} has taken its place; it does not join again"
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
  return None


def _shard(turn: Turn, learner: str) -> int | None:
  """The shard it had, else the lowest that no live learner holds."""
  old = turn.learners.get(learner)
  held = {
    other.shard
    for other in turn.learners.values()
    if other.live and other.learner != learner
  }
  if old is not None and old.shard >= 0 and old.shard not in held:
    return old.shard
  for shard in range(turn.rules.num_shards):
    if shard not in held:
      return shard
  return None


def _admit(
  turn: Turn, event: events.Joined, old: Learner | None, shard: int
) -> None:
  nonces: tuple[str, ...] = ()
  if old is not None:
    nonces = (*old.fenced_nonces[-3:], old.nonce)
    fence(turn, old, f"a new process of {event.learner} joined")
  for other in tuple(turn.learners.values()):
    if other.shard == shard and other.learner != event.learner:
      fence(turn, other, f"{event.learner} took over its data shard {shard}")
      turn.put(turn.learners[other.learner]._replace(shard=-1))
  num = turn.rules.num_fragments
  incarnation = turn.next_incarnation
  turn.next_incarnation += 1
  learner = turn.put(
    Learner(
      learner=event.learner,
      nonce=event.nonce,
      incarnation=incarnation,
      shard=shard,
      joined_at=turn.now,
      heard_at=turn.now,
      step=turn.t if _is_cumulative(turn) else 0,
      counts=(ZERO,) * num,
      bases=(None,) * num,
      max_replies=max(1, event.max_replies),
      # One learner counts once for t to advance, whoever speaks for it.
      reported_t=-1 if old is None else old.reported_t,
      fenced_nonces=nonces,
    )
  )
  if event.learner not in turn.accounts:
    turn.own("accounts")[event.learner] = (ledger.Account(),) * num
  turn.has_joined = True
  wake_scan(turn, turn.now + turn.rules.lease_s)
  _welcome(turn, learner, reconnect=False)
  _restate_bases(turn, learner, event.bases)


def _reconnect(turn: Turn, event: events.Joined, old: Learner) -> None:
  learner = turn.put(
    old._replace(
      connected=True,
      live=True,
      heard_at=turn.now,
      max_replies=max(1, event.max_replies),
    )
  )
  turn.has_joined = True
  wake_scan(turn, turn.now + turn.rules.lease_s)
  _welcome(turn, learner, reconnect=True)
  _restate_bases(turn, learner, event.bases)
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
          reason=f"round {asked.round} still waits for {learner.learner}",
        )
      )
  if turn.end is None:
    return
  turn.emit(events.Ending(reason=turn.end.reason))
  if turn.end.exact:
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
  shard = learner.shard
  word = "reconnects" if reconnect else "joins"
  turn.emit(
    events.Welcome(
      learner=learner.learner,
      nonce=learner.nonce,
      incarnation=learner.incarnation,
      reconnect=reconnect,
      clocks=clocks,
      positions=(events.Position(shard, turn.accepted.get(shard, 0)),),
      t=turn.t,
      reason=(
        f"{learner.learner} {word} as incarnation {learner.incarnation} with "
        f"data shard {shard}; {turn.num_live} live"
      ),
    )
  )


def _restate_bases(
  turn: Turn, learner: Learner, bases: tuple[Version, ...]
) -> None:
  """Takes over the bases that a joining process says it trains from."""
  for p, base in enumerate(bases[: turn.rules.num_fragments]):
    if not is_valid_base(turn, p, base):
      turn.publish_to(
        events.Receiver(
          learner.learner, learner.incarnation, Outcome.NOT_ASKED
        ),
        p,
        f"version {base.n} of epoch {base.epoch} of fragment {p} was rolled "
        "back; take the newest",
      )
    elif learner.bases[p] != base:
      adopt(turn, turn.learners[learner.learner], p, base, ZERO)
    if is_valid_base(turn, p, base) and base.n < turn.fragments[p].version.n:
      turn.publish_to(
        events.Receiver(
          learner.learner, learner.incarnation, Outcome.NOT_ASKED
        ),
        p,
        f"fragment {p} is at version {turn.fragments[p].version.n} and "
        f"{learner.learner} at {base.n}",
      )


def adopt(
  turn: Turn, learner: Learner, fragment: int, base: Version, counts: Counts
) -> Learner:
  """A process trains fragment p from a new base: its counts start again."""
  name, current = learner.learner, learner.bases[fragment]
  account = turn.account(name, fragment)
  said = ledger.larger(learner.counts[fragment], counts)
  ending = turn.end is not None and turn.end.exact
  if current is not None:
    account = ledger.close(
      account,
      learner.incarnation,
      current,
      said,
      base,
      ledger.END if ending else ledger.OVERWRITTEN,
    )
  account = ledger.begin(account, learner.incarnation, base)
  turn.put_account(name, fragment, account)
  rows, bases = list(learner.counts), list(learner.bases)
  rows[fragment], bases[fragment] = ZERO, base
  learner = turn.put(
    learner._replace(counts=tuple(rows), bases=tuple(bases), fresh=True)
  )
  turn.settle(name, fragment)
  return learner


def fence(turn: Turn, learner: Learner, reason: str) -> None:
  """Ends an incarnation for good; its unmerged steps are booked as lost."""
  if learner.gone:
    return
  turn.emit(
    events.Fence(
      learner=learner.learner, incarnation=learner.incarnation, reason=reason
    )
  )
  _end(turn, learner)


def leave(turn: Turn, event: events.Left) -> None:
  learner = turn.speaker(event)
  if learner is not None:
    _end(turn, learner)


def _end(turn: Turn, learner: Learner) -> None:
  turn.put(
    learner._replace(
      live=False, training=False, connected=False, gone=True, asked=()
    )
  )
  release(turn, learner)
  for p in range(turn.rules.num_fragments):
    account = ledger.close(
      turn.account(learner.learner, p),
      learner.incarnation,
      learner.bases[p],
      learner.counts[p],
      None,
      ledger.LOST,
    )
    turn.put_account(learner.learner, p, ledger.settle(account))


def release(turn: Turn, learner: Learner) -> None:
  """No open round waits for this process any longer."""
  member = (learner.learner, learner.incarnation)
  for r in turn.rounds:
    if member in r.waiting:
      waiting = tuple(w for w in r.waiting if w != member)
      turn.put_round(r, r._replace(waiting=waiting))


def hear(turn: Turn, learner: Learner) -> Learner:
  """Any byte of a process keeps, or makes, it live."""
  wake_scan(turn, turn.now + turn.rules.lease_s)
  training = learner.training
  if not learner.live:
    training = learner.waiting or learner.exhausted
  return turn.put(
    learner._replace(heard_at=turn.now, live=True, training=training)
  )


def disconnect(turn: Turn, event: events.Disconnected) -> None:
  learner = turn.speaker(event)
  if learner is not None:
    turn.put(learner._replace(connected=False))


def scan(turn: Turn) -> None:
  """Lets leases run out, and finds who has stopped training."""
  if turn.scan_at is None or turn.now < turn.scan_at:
    return
  training_s = max(TRAINING_S, 10 * (turn.step_s or 0.0))
  turn.scan_at = None
  for learner in tuple(turn.learners.values()):
    if not learner.live:
      continue
    lapses_at = learner.heard_at + turn.rules.lease_s
    if lapses_at <= turn.now:
      turn.count("lease_expired")
      turn.put(learner._replace(live=False, training=False, asked=()))
      release(turn, learner)
      for asked in learner.asked:
        turn.settle(learner.learner, asked.fragment)
      continue
    wake_scan(turn, lapses_at)
    if learner.training and not (learner.waiting or learner.exhausted):
      stops_at = learner.stepped_at + training_s
      if stops_at <= turn.now:
        turn.put(learner._replace(training=False))
      else:
        wake_scan(turn, stops_at)


def wake_scan(turn: Turn, at: float) -> None:
  if turn.scan_at is None or at < turn.scan_at:
    turn.scan_at = at


def _is_cumulative(turn: Turn) -> bool:
  return turn.rules.wait_for_publication or turn.rules.max_ahead > 0
