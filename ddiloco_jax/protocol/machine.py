"""The machine: one event in, the next state and its decisions out.

The theory, top to bottom (arXiv 2604.21428, Sec. 3; Eq. 3; App. E):

1. Learners report every step; nobody waits for anybody. (`schedule.reported`)
2. t follows their step time, and makes one fragment due after the other.
   (`schedule.advance`)
3. A due fragment opens a round: the members are frozen and pulled.
   (`rounds.open_due`)
4. K replies make a quorum; the grace window lets the others in; then all are
   merged into the next version. (`replies.replied`, `rounds.progress`)
5. The version is published to everybody and adopted at a step boundary, which
   starts a new span of counts. (`publishing.merged`, `publishing.applied`)
6. Who is silent, gone or late changes who is asked, never whether the others
   go on. (`membership`)
7. A snapshot is a cut between two versions, marked and saved by each.
   (`snapshots`)
8. At the end every fragment is flushed once, published exactly, and
   acknowledged. (`ending`)

No clock, no randomness, no I/O, and no event order that raises.
"""

import hashlib
import json
from typing import Any

from ddiloco_jax.protocol import (
  ending,
  events,
  joining,
  ledger,
  membership,
  publishing,
  recovery,
  replies,
  rounds,
  saved,
  schedule,
  shards,
  snapshots,
  uploads,
)
from ddiloco_jax.protocol.events import ZERO, Effect, Event
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.protocol.state import State, initial
from ddiloco_jax.protocol.turn import Turn

FORMAT = 5  # Of a saved state: raised whenever the fields of a state change.

__all__ = [
  "digest",
  "initial",
  "load",
  "next_timer",
  "restore",
  "save",
  "step",
]


def step(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
  """Consumes one event.

  Args:
    state: Never written.
    event: Its time may not lie before the last one's; if it does, the last
      one's counts.

  Returns:
    The next state, and what is to be done, in this order.
  """
  turn = Turn(state)
  turn.now = max(state.now, event.time)
  turn.num_events += 1
  if state.end is not None and state.end.finished:
    _after_the_end(turn, event)
    return turn.freeze(), tuple(turn.effects)
  if membership.scan(turn):
    shards.scan(turn)
  uploads.expire_carried(turn)
  _consume(turn, event)
  schedule.advance(turn)
  ending.check(turn)
  rounds.progress(turn)
  snapshots.progress(turn)
  held = snapshots.holds_rounds(turn)
  if turn.queue and not (held or _is_idle(turn, state)):
    rounds.open_due(turn)
    rounds.progress(turn)
  ending.progress(turn)
  return turn.freeze(), tuple(turn.effects)


def _consume(turn: Turn, event: Event) -> None:
  match event:
    case events.Reported():
      schedule.reported(turn, event)
    case events.Applied():
      publishing.applied(turn, event)
      ending.acknowledge(turn, event)
    case events.Replied():
      replies.replied(turn, event)
    case events.Pushing():
      uploads.pushing(turn, event)
    case events.Merged():
      publishing.merged(turn, event)
    case events.Heard():
      learner = turn.speaker(event)
      if learner is not None:
        turn.quiet = learner.live
        membership.hear(turn, learner)
    case events.Joined():
      joining.join(turn, event)
    case events.Disconnected():
      membership.disconnect(turn, event)
    case events.Left():
      membership.leave(turn, event)
    case events.Recovered():
      recovery.recovered(turn, event)
    case events.PushBroken():
      uploads.push_broken(turn, event)
    case events.Misspoke():
      turn.count("impossible")
    case events.SnapshotRequested():
      snapshots.request(turn)
    case events.MarkerDone():
      snapshots.marker_done(turn, event)
    case events.Captured():
      snapshots.captured(turn, event)
    case events.StopRequested():
      ending.stop_requested(turn, event)
    case events.EvictRequested():
      membership.evict(turn, event)
    case _:
      pass  # Ticked: time has passed, which every step looks at.


def _is_idle(turn: Turn, before: State) -> bool:
  """Whether no due fragment can have become ready to open in this step."""
  return (
    turn.quiet
    and turn.t == before.t
    and turn.rounds is before.rounds
    and turn.num_live == before.num_live
    and turn.cut is before.cut
    and not any(before.now < d.not_before <= turn.now for d in turn.queue)
  )


def _after_the_end(turn: Turn, event: Event) -> None:
  if isinstance(event, events.Joined):
    joining.join(turn, event)
  elif isinstance(event, events.Replied):
    turn.count("late")
    turn.emit(
      events.Resolved(
        key=replies.key_of(event),
        outcome=events.Outcome.LATE,
        reason="the run has finished",
      )
    )
  elif isinstance(event, events.SnapshotRequested):
    snapshots.request(turn)


def next_timer(state: State) -> float | None:
  """When a `Ticked` is wanted, if nothing happens before; None: never."""
  end = state.end
  if end is not None and end.finished:
    return None
  times = [state.scan_at, state.carried_check_at, schedule.pace_at(state)]
  for r in state.rounds:
    if not r.merging:
      times.append(r.deadline if r.quorum_at is None else r.grace_end)
  if state.queue and len(state.rounds) < state.rules.max_open_rounds:
    times += [due.not_before for due in state.queue]
  if state.cut is not None:
    times.append(state.cut.until)
    times.append(snapshots.write_until(state, state.cut))
  if end is not None:
    times.append(end.until)
  elif state.lacking_since is not None:
    times.append(state.lacking_since + state.rules.quorum_timeout_s)
  ahead = [at for at in times if at is not None and at > state.now]
  return min(ahead, default=None)


def save(state: State) -> dict[str, Any]:
  """The state as strict JSON values, its rules apart."""
  fields = {name: saved.encode(v) for name, v in state._asdict().items()}
  del fields["rules"]
  return {"format": FORMAT, **fields}


def check_format(values: dict[str, Any]) -> None:
  """Refuses what another release's `save` gave.

  Raises:
    ValueError: It is of another format.
  """
  found = values.get("format")
  if found != FORMAT:
    raise ValueError(
      f"the saved protocol state has format {found!r} and this release reads"
      f" {FORMAT}, for a state has other fields now: go on with the release"
      " that wrote it, or begin another run in another --run_dir"
    )


def load(rules: Rules, values: dict[str, Any]) -> State:
  """The very state that `save` was given, in the same epoch.

  Raises:
    ValueError: What was saved is of another format, of another fragment
      count, or damaged.
  """
  check_format(values)
  fields = {name: v for name, v in values.items() if name != "format"}
  state = saved.decode_object(State, fields, rules=rules)
  num = len(state.fragments)
  if num != rules.num_fragments:
    raise ValueError(
      f"the saved run has {num} fragments and the config {rules.num_fragments}:"
      " P may not change at a restore; set num_fragments back"
    )
  return state


def restore(
  rules: Rules,
  values: dict[str, Any],
  epoch: int | None = None,
  merged: events.Merged | None = None,
) -> State:
  """The first state of a new epoch after a restart of the syncer.

  Versions, ledger, averages and time go on. Replies of open rounds are lost:
  what they cover stays pending until a later reply or an adoption decides it.
  Nobody is live until it is heard again. A run that was killed in its end comes
  to it again with the first learner that joins; one that has finished, and
  whose bound is reached still, stays so.

  Args:
    rules: May differ from the saved run's, the number of fragments apart.
    values: What `save` returned.
    epoch: Of the start, later than the saved one; None for the next.
    merged: A merge that was under way in the saved state, and was committed.

  Raises:
    ValueError: Another format, another P, or an epoch that is not later.
  """
  initial(rules)  # Refuses rules that contradict each other.
  old = load(rules, values)
  if merged is not None:
    booked = Turn(old)
    publishing.merged(booked, merged)
    old = booked.freeze()
  turn = Turn(old)
  turn.epoch = old.epoch + 1 if epoch is None else epoch
  if turn.epoch <= old.epoch:
    raise ValueError(
      f"epoch {turn.epoch} does not come after the saved epoch {old.epoch}: "
      "every start of a syncer raises it"
    )
  # Epochs that ended before they saved anything started from the same n.
  start = tuple(f.version.n for f in old.fragments)
  turn.starts = old.starts + (start,) * (turn.epoch - old.epoch)
  cause = ending.end_cause(turn)
  was_over = old.end is not None and old.end.finished
  if old.end is not None and was_over and cause is None:
    turn.accounts = dict(old.end.accounts)
  _lose_replies(turn, old)
  _hear_nobody(turn, old)
  queued = {due.fragment for due in old.queue}
  lost = (rounds.due_again(r) for r in old.rounds if r.fragment not in queued)
  turn.queue = (*old.queue, *lost)
  turn.rounds, turn.carried, turn.syncs = (), (), {}
  turn.num_events = turn.num_reported = 0
  turn.has_joined = False
  turn.t_due, turn.lacking_since = turn.now, None
  turn.scan_at = turn.carried_check_at = turn.end = None
  turn.cut = None
  if cause is not None and was_over:
    turn.end = ending.already_over(old, cause)
  return turn.freeze()


def digest(state: State) -> str:
  """A name of the whole state, the same on every machine: hex SHA-256."""
  text = json.dumps(
    saved.encode(state), sort_keys=True, separators=(",", ":"), allow_nan=False
  )
  return hashlib.sha256(text.encode()).hexdigest()


def _lose_replies(turn: Turn, old: State) -> None:
  """Replies that no version has, of rounds that nobody goes on with."""
  for r in (*(reply for o in old.rounds for reply in o.replies), *old.carried):
    account = turn.account(r.key.learner, r.key.fragment)
    account = ledger.uncover(account, r.key, ledger.GIVEN_UP)
    turn.put_account(r.key.learner, r.key.fragment, account)


def _hear_nobody(turn: Turn, old: State) -> None:
  """Every learner is to be heard again, in the books as on the stream."""
  for learner in old.learners.values():
    turn.put(
      learner._replace(
        # Who was live has a whole lease to come back.
        heard_at=turn.now if learner.live else learner.heard_at,
        live=False,
        training=False,
        connected=False,
        asked=(),
        exact=(),
        reported_t=-1,
        heard=False,
        counts=(ZERO,) * turn.rules.num_fragments,
      )
    )
    for p in range(turn.rules.num_fragments):
      account = turn.account(learner.learner, p)
      # It may have adopted this base once more since: its counts may be less.
      account = ledger.say(
        account, learner.incarnation, learner.bases[p], learner.counts[p]
      )
      turn.put_account(learner.learner, p, account)
      turn.settle(learner.learner, p)
