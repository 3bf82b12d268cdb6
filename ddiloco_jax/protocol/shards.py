"""Who reads which data shard: its owner, or another while the owner is away.

A shard is read by one process at a time (`Learner.reads`), and whoever takes it
over goes on at its accepted position. A shard that is lent is given back once
its reader has said where it stopped. (arXiv 2604.21428, Sec. 5 and App. E.)
"""

from typing import NamedTuple

from ddiloco_jax.protocol import events, membership
from ddiloco_jax.protocol.events import Position
from ddiloco_jax.protocol.state import CalledBack, Learner
from ddiloco_jax.protocol.turn import Turn

_MAX_NAMES = 8  # That a sentence has.


class Claim(NamedTuple):
  """What a joining process owns, and what of it it may read at once."""

  owned: tuple[int, ...]
  reads: tuple[int, ...]


def claim(turn: Turn, name: str) -> Claim | str:
  """The shards of a joining process, or why it has to wait for one.

  It keeps what it owned. What it lacks are the lowest shards of nobody, or of who
  is over; then those of learners that are away, which lose them.

  Returns:
    A claim without shards where all of them are held; a sentence where a lent
    one was called back for it, or where somebody is awaited.
  """
  old = turn.learners.get(name)
  others = [m for m in turn.learners.values() if m.learner != name]
  awaited = [m for m in others if membership.is_awaited(turn, m)]
  live = [m for m in others if m.live]
  here = (*live, *awaited)
  taken = {shard for m in here for shard in m.reads}
  owned = old.shards if old is not None else ()
  held = taken.union(owned, *(m.shards for m in here))
  kept = {shard for m in others if not m.gone for shard in m.shards}
  free = [s for s in range(turn.rules.num_shards) if s not in held]
  free.sort(key=lambda shard: (shard in kept, shard))
  lacking = max(0, turn.rules.shards_per_learner - len(owned))
  owned = (*owned, *free[:lacking])
  reads = tuple(shard for shard in owned if shard not in taken)
  lent = [shard for shard in owned if shard in taken]
  if not owned:
    lent = _one_that_is_lent(turn, live)
  for shard in lent:
    call_back(turn, shard)
  if reads:
    return Claim(owned, reads)
  if lent:
    return (
      f"data shard {lent[0]} is lent to {_reader(turn, lent[0])}, which was told "
      "to give it back at its next step boundary; join again"
    )
  if awaited:
    names = ", ".join(sorted(m.learner for m in awaited)[:_MAX_NAMES])
    return (
      f"no data shard is free before the lease of {names} has run out, unheard "
      "since the syncer's restart; join again"
    )
  return Claim((), ())


def take(turn: Turn, name: str, claimed: Claim) -> None:
  """Takes shards from learners that are away; they cannot go on with them."""
  for other in tuple(turn.learners.values()):
    if other.learner == name:
      continue
    if shared := set(other.reads).intersection(claimed.reads):
      membership.fence(
        turn, other, f"{name} took over its data shard {min(shared)}"
      )
    if set(other.shards).intersection(claimed.owned):
      kept = tuple(s for s in other.shards if s not in claimed.owned)
      turn.put(turn.learners[other.learner]._replace(shards=kept))


def knows(turn: Turn, reader: Learner, event: events.Joined) -> bool:
  """Whether a process reads, and has given back, what it is known to."""
  called_back = {called.shard for called in reader.called_back}
  return set(event.reads) <= set(reader.reads) and all(
    shard in called_back
    if shard in reader.reads
    else batch <= turn.accepted.get(shard, 0)
    for shard, batch in event.returned
  )


def positions(turn: Turn, learner: Learner) -> tuple[Position, ...]:
  """What a process is to read, and from where."""
  given_up = {called.shard for called in learner.called_back}
  return tuple(
    Position(shard, turn.accepted.get(shard, 0))
    for shard in sorted(learner.reads)
    if shard not in given_up
  )


def tell(turn: Turn, learner: Learner, reason: str) -> None:
  """Says all that a process is to read from its next step boundary on."""
  if learner.takes_shards:
    turn.emit(
      events.Shards(
        learner=learner.learner,
        incarnation=learner.incarnation,
        positions=positions(turn, learner),
        reason=reason,
      )
    )


def call_back(turn: Turn, shard: int) -> None:
  """Asks the reader of a lent shard to give it up; once."""
  reader = turn.learners[_reader(turn, shard)]
  if any(called.shard == shard for called in reader.called_back):
    return
  reader = turn.put(
    reader._replace(
      called_back=(*reader.called_back, CalledBack(shard, turn.now))
    )
  )
  membership.wake_scan(turn, turn.now + _give_back_s(turn))
  owner = _owner(turn, shard)
  if owner is not None:  # It is not lent to the next one meanwhile.
    turn.put(owner._replace(lend_at=turn.now + turn.rules.shard_lease_s))
  # Before it is seen to read the shard, it may still have to be told to.
  if any(shard == position.shard for position in reader.positions):
    tell(turn, reader, f"data shard {shard} is wanted back")


def reported(turn: Turn, before: Learner, event: events.Reported) -> None:
  """A report shows which shards are being read, and which were given up."""
  if not before.called_back:
    return
  wanted = {called.shard for called in before.called_back}
  known = {position.shard for position in before.positions}
  now = {position.shard for position in event.positions}
  if wanted & (now - known):
    shards = ", ".join(str(shard) for shard in sorted(wanted & now))
    tell(turn, turn.learners[event.learner], f"wanted back: {shards}")
  for shard, batch in event.returned:
    if shard in wanted and shard in known and shard not in now:
      _given_back(turn, turn.learners[event.learner], shard, batch)


def _given_back(turn: Turn, reader: Learner, shard: int, batch: int) -> None:
  turn.put(
    reader._replace(
      reads=tuple(s for s in reader.reads if s != shard),
      called_back=tuple(c for c in reader.called_back if c.shard != shard),
    )
  )
  # What its reader had not merged by then is in the books of the reader.
  batch = max(batch, turn.accepted.get(shard, 0))
  turn.own("accepted")[shard] = batch
  _give_to_owner(turn, shard)


def scan(turn: Turn) -> None:
  """Lends the shards of learners that are away for long, one by one."""
  if turn.end is not None:
    return
  for reader in tuple(turn.learners.values()):
    for shard, since in reader.called_back:
      at = since + _give_back_s(turn)
      if at > turn.now:
        membership.wake_scan(turn, at)
      elif not turn.learners[reader.learner].gone:
        membership.fence(
          turn,
          turn.learners[reader.learner],
          f"it did not give data shard {shard} back for "
          f"{turn.now - since:.0f} s",
        )
  if turn.rules.shard_lease_s <= 0:
    return
  owned = [(s, m.learner) for m in turn.learners.values() for s in m.shards]
  for shard, name in owned:
    if turn.learners[name].live:
      _give_to_owner(turn, shard)
    elif _may_lend(turn, shard, turn.learners[name]):
      _lend(turn, shard)


def _awaits(turn: Turn, reader: Learner) -> bool:
  """Whether a reader may come back after a restart; looks again when not."""
  if not membership.is_awaited(turn, reader):
    return False
  membership.wake_scan(turn, reader.heard_at + turn.rules.lease_s)
  return True


def _give_back_s(turn: Turn) -> float:
  """How long who holds a shard may take, also where nothing is lent (0)."""
  return max(turn.rules.shard_lease_s, turn.rules.lease_s)


def _give_to_owner(turn: Turn, shard: int) -> None:
  """Lets the owner read a shard that nobody live reads."""
  owner = _owner(turn, shard)
  if owner is None or not owner.live or not owner.takes_shards:
    return
  if shard in owner.reads:
    return
  name = _reader(turn, shard)
  if name:
    if turn.learners[name].live or _awaits(turn, turn.learners[name]):
      return
    membership.fence(
      turn,
      turn.learners[name],
      f"{owner.learner} takes back its data shard {shard}",
    )
  owner = turn.put(owner._replace(reads=(*owner.reads, shard)))
  tell(turn, owner, f"data shard {shard} is given back to its owner")


def _may_lend(turn: Turn, shard: int, owner: Learner) -> bool:
  """Whether whoever might still read it has been away for long enough."""
  reader = turn.learners.get(_reader(turn, shard))
  if reader is not None and reader.live:
    return False
  if not _takers(turn):
    return False
  lease_s = _give_back_s(turn)
  away = (owner, reader or owner)
  at = max(m.heard_at + lease_s for m in away)
  at = max(at, owner.lend_at)
  if at > turn.now:
    membership.wake_scan(turn, at)
    return False
  return True


def _lend(turn: Turn, shard: int) -> None:
  owner = _owner(turn, shard)
  assert owner is not None, shard
  away_s = turn.now - owner.heard_at
  reason = f"data shard {shard} of {owner.learner}, away for {away_s:.0f} s"
  if name := _reader(turn, shard):
    membership.fence(turn, turn.learners[name], f"{reason}, is lent to others")
  taker = min(_takers(turn), key=lambda m: (len(m.reads), m.learner))
  taker = turn.put(taker._replace(reads=(*taker.reads, shard)))
  turn.count("shard_lent")
  tell(turn, taker, f"{reason}, is lent to {taker.learner}")


def _takers(turn: Turn) -> list[Learner]:
  return [
    m
    for m in turn.learners.values()
    if m.takes_shards and m.training and m.connected and not m.exhausted
  ]


def _one_that_is_lent(turn: Turn, live: list[Learner]) -> list[int]:
  """A shard that the learner with the most can spare for a newcomer."""
  most = max(live, key=lambda m: len(m.reads), default=None)
  if most is None:
    return []
  away = {m.learner for m in turn.learners.values() if not m.live}
  lent = [
    shard
    for shard in most.reads
    if (owner := _owner(turn, shard)) is not None and owner.learner in away
  ]
  return lent[-1:]


def _reader(turn: Turn, shard: int) -> str:
  for learner in turn.learners.values():
    if shard in learner.reads:
      return learner.learner
  return ""


def _owner(turn: Turn, shard: int) -> Learner | None:
  for learner in turn.learners.values():
    if shard in learner.shards:
      return learner
  return None
