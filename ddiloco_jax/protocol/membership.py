"""Who takes part: leases, and what each process trains from.

Liveness is any byte within the lease, whatever a stream does. The bases of all
learners are the run's vector clock. (arXiv 2604.21428, Sec. 3.1 and App. E.)
"""

from collections.abc import Sequence

from ddiloco_jax.protocol import events, ledger, lives
from ddiloco_jax.protocol.events import ZERO, Counts, Version
from ddiloco_jax.protocol.state import Learner, State
from ddiloco_jax.protocol.turn import Turn

# A learner without a new step for longer than this, or ten steps, is not
# training: long enough for a compilation or a checkpoint.
TRAINING_S = 60.0
# Processes of one id that are remembered as replaced: more than live at a time.
MAX_FENCED = 64


def is_valid_base(state: State | Turn, fragment: int, base: Version) -> bool:
  """Whether a base has the bytes that its version has in this epoch."""
  if base.epoch == state.epoch:
    return 0 <= base.n <= state.fragments[fragment].version.n
  if not 1 <= base.epoch < state.epoch:
    return False
  later = state.starts[base.epoch :]
  return 0 <= base.n <= min(start[fragment] for start in later)


def replace_rolled_back(
  turn: Turn, learner: Learner, fragment: int, base: Version
) -> None:
  """Points a process that trains from a lost version to the newest."""
  turn.publish_to(
    events.Receiver(
      learner.learner, learner.incarnation, events.Outcome.NOT_ASKED
    ),
    fragment,
    f"version {base.n} of epoch {base.epoch} of fragment {fragment} was rolled "
    "back; take the newest",
  )


def adopt(
  turn: Turn,
  learner: Learner,
  fragment: int,
  base: Version,
  step: int | None,
  counts: Counts,
) -> Learner:
  """A process trains a fragment from a new base: its counts start again.

  Args:
    turn: Of the event.
    learner: Its process.
    fragment: Which one.
    base: What it adopted.
    step: Its step then, if it is known.
    counts: What the adoption reset.
  """
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
  adopted_at = list(learner.adopted_at)
  rows[fragment], bases[fragment], adopted_at[fragment] = ZERO, base, step
  learner = turn.put(
    learner._replace(
      counts=tuple(rows),
      bases=tuple(bases),
      adopted_at=tuple(adopted_at),
      fresh=True,
    )
  )
  turn.settle(name, fragment)
  return learner


def unknown_adoptions(
  learner: Learner, adoptions: Sequence[events.Adoption]
) -> list[events.Adoption]:
  """Those of a process that were lost on their way here, oldest first.

  Args:
    learner: The process, as it is known.
    adoptions: Its last ones of each fragment, oldest first.
  """
  unknown: list[events.Adoption] = []
  for p, step in enumerate(learner.adopted_at):
    said = [adoption for adoption in adoptions if adoption.fragment == p]
    told = [i for i, a in enumerate(said) if is_known(learner, a)]
    # The last: a second adoption of one version in one step resets nothing.
    if told:
      unknown += said[told[-1] + 1 :]
    else:
      unknown += [a for a in said if step is None or a.step >= step]
  return unknown


def is_known(learner: Learner, adoption: events.Adoption) -> bool:
  """Whether it is the newest of its fragment that a process has told."""
  p, version, step, _ = adoption
  return (learner.bases[p], learner.adopted_at[p]) == (version, step)


def hear(turn: Turn, learner: Learner) -> Learner:
  """Any byte of a process keeps, or makes, it live."""
  wake_scan(turn, turn.now + turn.rules.lease_s)
  if not learner.live:
    learner = learner._replace(
      training=learner.waiting or learner.exhausted,
      untimed=True,
    )
  return turn.put(learner._replace(heard_at=turn.now, live=True))


def is_awaited(turn: Turn, learner: Learner) -> bool:
  """Whether its lease runs, though nobody has heard it since a restart."""
  if learner.live or learner.gone:
    return False
  return turn.now < learner.heard_at + turn.rules.lease_s


def disconnect(turn: Turn, event: events.Disconnected) -> None:
  learner = turn.speaker(event)
  if learner is not None:
    turn.put(learner._replace(connected=False))


def leave(turn: Turn, event: events.Left) -> None:
  learner = turn.speaker(event)
  if learner is not None:
    _end(turn, learner)
    _lose(turn, learner)


def fence(turn: Turn, learner: Learner, reason: str) -> None:
  """Ends an incarnation for good; its unmerged steps are booked as lost."""
  if learner.gone:
    _lose(turn, learner)
    return
  turn.emit(
    events.Fence(
      learner=learner.learner, incarnation=learner.incarnation, reason=reason
    )
  )
  _end(turn, learner)
  _lose(turn, learner)


def evict(turn: Turn, event: events.EvictRequested) -> None:
  """Ends a process for good; another one may take its id."""
  learner = turn.learners.get(event.learner)
  if learner is None or is_fenced(learner, learner.nonce):
    return
  fence(turn, learner, f"{event.learner} was evicted: {event.reason}")
  turn.count("evicted")
  learner = turn.learners[event.learner]
  evicted = (*learner.evicted_nonces, learner.nonce)
  turn.put(learner._replace(evicted_nonces=evicted))


def is_fenced(learner: Learner, nonce: str) -> bool:
  """Whether a process of an id may not join again."""
  first = lives.first_life(nonce)
  return nonce in learner.fenced_nonces or any(
    first == lives.first_life(evicted) for evicted in learner.evicted_nonces
  )


def replaced(learner: Learner, nonce: str) -> tuple[str, ...]:
  """The last processes of an id that are over once a new one is admitted."""
  if learner.nonce == nonce or is_fenced(learner, learner.nonce):
    return learner.fenced_nonces
  return (*learner.fenced_nonces, learner.nonce)[-MAX_FENCED:]


def _end(turn: Turn, learner: Learner) -> None:
  turn.put(
    learner._replace(
      live=False,
      training=False,
      connected=False,
      gone=True,
      asked=(),
      reads=(),
      called_back=(),
    )
  )
  release(turn, learner)


def _lose(turn: Turn, learner: Learner) -> None:
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


def scan(turn: Turn) -> bool:
  """Lets leases run out, and finds who has stopped training; True if due."""
  if turn.scan_at is None or turn.now < turn.scan_at:
    return False
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
  return True


def wake_scan(turn: Turn, at: float) -> None:
  if turn.scan_at is None or at < turn.scan_at:
    turn.scan_at = at
