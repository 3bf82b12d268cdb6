"""A consistent cut of a run: markers between two versions.

No round opens until the open ones are over; then V is the clock of the cut, and
every live learner gets a marker with it; one that is away is named as not in
the cut. Rounds open again once each has said that it holds V, and the syncer
has copied its own part: a learner looks at its marker before it adopts anything
newer, so nothing after V gets into the cut while files are still being written.
When all have answered, the syncer writes who is in it; then it is a cut. Every
wait has a bound.
(Chandy and Lamport, 1985; arXiv 2604.21428, App. E.)
"""

from ddiloco_jax.protocol import events, membership
from ddiloco_jax.protocol.state import Cut, Member, State
from ddiloco_jax.protocol.turn import Turn

# The syncer's part may be of many gigabytes, and holds up nobody.
WRITE_LEASES = 10


def request(turn: Turn) -> None:
  """Begins a cut, or joins the one that is under way."""
  if turn.end is not None:
    turn.emit(
      events.SnapshotOver(
        snapshot=0,
        reason=f"the run ends ({turn.end.reason}); its last checkpoint is"
        " written at its end",
      )
    )
    return
  if turn.cut is None:
    until = turn.now + turn.deadline_s() + turn.rules.lease_s
    turn.cut = Cut(turn.next_snapshot, until)
    turn.next_snapshot += 1


def marker_done(turn: Turn, event: events.MarkerDone) -> None:
  """A learner has its part on disk, or says why not."""
  cut, member = turn.cut, Member(event.learner, event.incarnation)
  if cut is None or event.snapshot != cut.snapshot:
    turn.count("late_marker")
  elif member in cut.awaited:
    awaited = tuple(m for m in cut.awaited if m != member)
    if event.saved and not _trains_from(turn, member, cut.clock):
      why = "it says that it saved, and not that it holds the cut's clock"
      skipped = (*cut.skipped, f"{event.learner}: {why}")
      turn.cut = cut._replace(awaited=awaited, skipped=skipped)
    elif event.saved:
      saved = (*cut.saved, event.learner)
      turn.cut = cut._replace(awaited=awaited, saved=saved)
    else:
      skipped = (*cut.skipped, f"{event.learner}: {event.reason}")
      turn.cut = cut._replace(awaited=awaited, skipped=skipped)


def captured(turn: Turn, event: events.Captured) -> None:
  """The syncer has a copy of its tensors at V, or the whole cut is on disk."""
  cut = turn.cut
  if cut is None or event.snapshot != cut.snapshot:
    return
  if event.failure:
    _over(turn, cut, f"the syncer's own part failed: {event.failure}")
  else:
    turn.cut = cut._replace(copied=True, path=event.path)


def holds_rounds(turn: Turn) -> bool:
  """Whether no round may open, so that nothing newer than V appears."""
  cut = turn.cut
  if cut is None:
    return False
  if not cut.marked or not cut.copied:
    return True
  return any(not _holds(turn, m, cut.clock) for m in cut.awaited)


def progress(turn: Turn) -> None:
  """Takes the cut further, and ends it when all is said or time is up."""
  cut = turn.cut
  if cut is None:
    return
  if turn.end is not None:
    _over(turn, cut, f"the run ends ({turn.end.reason})")
  elif not cut.marked:
    if not turn.rounds:
      _mark(turn, cut)
    elif turn.now >= cut.until:
      names = ", ".join(str(r.round) for r in turn.rounds)
      _over(turn, cut, f"round {names} did not close; take it again")
  else:
    _collect(turn, cut)


def result(cut: Cut, reason: str = "") -> events.SnapshotOver:
  """What is said of a cut in which all have answered; a reason: given up."""
  return events.SnapshotOver(
    snapshot=cut.snapshot,
    reason=reason,
    path=cut.path,
    clock=cut.clock,
    learners=cut.saved,
    skipped=cut.skipped,
  )


def write_until(turn: Turn | State, cut: Cut) -> float:
  """When the syncer's own part must be on disk."""
  return cut.until + WRITE_LEASES * turn.rules.lease_s


def _mark(turn: Turn, cut: Cut) -> None:
  clock = tuple(f.version for f in turn.fragments)
  live = [m for m in turn.learners.values() if m.live]
  awaited = tuple(Member(m.learner, m.incarnation) for m in live)
  turn.cut = cut._replace(
    marked=True,
    clock=clock,
    awaited=awaited,
    skipped=_away(turn),
    until=turn.now + turn.rules.lease_s,
  )
  turn.emit(
    events.Marker(
      snapshot=cut.snapshot,
      clock=clock,
      members=tuple((m.learner, m.incarnation) for m in awaited),
      reason=f"snapshot {cut.snapshot}: {len(awaited)} live learners save",
    )
  )


def _away(turn: Turn) -> tuple[str, ...]:
  """Who gets no marker, and may be back.

  A goodbye does not say whether it is for good: who starts over joins again
  within a lease, and after it nobody is missed.
  """
  return tuple(
    f"{m.learner}: not live when the markers were sent; last heard of "
    f"{turn.now - m.heard_at:.0f} s ago"
    for m in turn.learners.values()
    if not m.live
    and m.nonce not in m.evicted_nonces
    and not (m.gone and m.heard_at + turn.rules.lease_s <= turn.now)
  )


def _collect(turn: Turn, cut: Cut) -> None:
  gone = {m for m in cut.awaited if not _is_here(turn, m)}
  late = set(cut.awaited) - gone if turn.now >= cut.until else set()
  skipped = [f"{m.learner}: it left or was lost" for m in sorted(gone)]
  skipped += [
    f"{m.learner}: not done within {turn.rules.lease_s:g} s"
    for m in sorted(late)
  ]
  if skipped:
    cut = cut._replace(
      awaited=tuple(m for m in cut.awaited if m not in gone | late),
      skipped=(*cut.skipped, *skipped),
    )
    turn.cut = cut
  if cut.awaited:
    return
  if cut.path:
    turn.count("snapshots")
    _over(turn, cut, "")
  elif turn.now >= write_until(turn, cut):
    _over(turn, cut, "the syncer's own part was not on disk in time")


def _over(turn: Turn, cut: Cut, reason: str) -> None:
  turn.cut = None
  turn.emit(result(cut, reason))


def _is_here(turn: Turn, member: Member) -> bool:
  process = turn.learners[member.learner]
  return process.live and process.incarnation == member.incarnation


def _holds(
  turn: Turn, member: Member, clock: tuple[events.Version, ...]
) -> bool:
  """Whether it has said that it trains from V; one that is lost holds none up."""
  process = turn.learners[member.learner]
  if process.incarnation != member.incarnation or not process.live:
    return True
  return _trains_from(turn, member, clock)


def _trains_from(
  turn: Turn, member: Member, clock: tuple[events.Version, ...]
) -> bool:
  """Whether its bases are of V or later: of the bytes that these have now."""
  process = turn.learners[member.learner]
  return process.incarnation == member.incarnation and all(
    base is not None
    and base.n >= version.n
    and membership.is_valid_base(turn, p, base)
    for p, (base, version) in enumerate(zip(process.bases, clock))
  )
