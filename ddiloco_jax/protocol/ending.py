"""How a run ends: finish, flush, publish exactly, be acknowledged, exit.

(arXiv 2604.21428, Sec. 3; the flush is ours.)
"""

import dataclasses

from ddiloco_jax.protocol import events, ledger, members, replies, rounds
from ddiloco_jax.protocol.events import Outcome, Receiver
from ddiloco_jax.protocol.state import Due, End, Learner, State
from ddiloco_jax.protocol.turn import Turn

EXIT_OK = 0
EXIT_QUORUM_TIMEOUT = 4


def stop_requested(turn: Turn, event: events.StopRequested) -> None:
  """Ends the run in order, unless it ends already."""
  if turn.end is None:
    start(turn, "stop_requested", event.reason, EXIT_OK)


def check(turn: Turn) -> None:
  """Starts the end of the run when one of its causes is given."""
  if turn.end is not None:
    return
  cause = end_cause(turn)
  if cause is not None:
    start(turn, cause[0], cause[1], EXIT_OK)
    return
  k = turn.rules.quorum
  if turn.num_exhausted and turn.num_live - turn.num_exhausted < k:
    start(
      turn,
      "input_exhausted",
      f"the data of {turn.num_exhausted} of {turn.num_live} live learners is "
      f"used up, and the quorum is {k}",
      EXIT_OK,
    )
    return
  if not turn.has_joined or turn.num_training >= k:
    turn.lacking_since = None
    return
  if turn.lacking_since is None:
    turn.lacking_since = turn.now
  if turn.now >= turn.lacking_since + turn.rules.quorum_timeout_s:
    start(
      turn,
      "quorum_timeout",
      f"for {turn.rules.quorum_timeout_s:g} s only {turn.num_training} "
      f"learners trained, and the quorum is {k}",
      EXIT_QUORUM_TIMEOUT,
    )


def end_cause(turn: Turn) -> tuple[str, str] | None:
  """The bound that the run has reached, if any: (cause, sentence)."""
  rules = turn.rules
  if rules.num_syncer_steps and turn.t >= rules.num_syncer_steps:
    return "num_syncer_steps", f"t has reached {rules.num_syncer_steps}"
  if rules.num_tokens:
    tokens = mean_over_fragments(
      [f.merged.tokens for f in turn.fragments], rules.fragment_params
    )
    if tokens >= rules.num_tokens:
      return "num_tokens", (
        f"{int(tokens)} tokens are merged and num_tokens is {rules.num_tokens}"
      )
  return None


def mean_over_fragments(values: list[int], params: tuple[int, ...]) -> float:
  """A run's total of one book: a token belongs to every fragment once."""
  weights = params or (1,) * len(values)
  return sum(v * w for v, w in zip(values, weights)) / sum(weights)


def start(turn: Turn, cause: str, reason: str, exit_code: int) -> None:
  turn.queue = ()
  turn.end = End(
    cause=cause,
    reason=f"{cause}: {reason}",
    exit_code=exit_code,
    pending=tuple(range(turn.rules.num_fragments)),
    until=turn.now + turn.rules.flush_s,
  )
  turn.emit(events.Ending(reason=turn.end.reason))


def already_over(old: State, cause: tuple[str, str]) -> End:
  """The end of a restored run whose bound is reached already."""
  assert old.end is not None
  return End(
    cause=cause[0],
    reason=f"{cause[0]}: {cause[1]}",
    exit_code=EXIT_OK,
    pending=(),
    until=old.now,
    finished=True,
    accounts=old.end.accounts,
  )


def progress(turn: Turn) -> None:
  """Moves the end of the run on as far as it can go now."""
  end = turn.end
  if end is None or end.finished:
    return
  if not end.exact:
    end = _flush(turn, end)
    if not end.pending and not turn.rounds:
      _publish_exact(turn)
  if turn.end is not None and turn.end.exact:
    _await(turn)


def _flush(turn: Turn, end: End) -> End:
  """One last round per fragment, with whoever has progress in it."""
  if turn.now >= end.until:
    turn.end = end = dataclasses.replace(end, pending=())
    for r in turn.rounds:
      if not r.merging:
        rounds.give_up(turn, r, f"the flush has lasted {turn.rules.flush_s} s")
    return end
  if _is_answering(turn):
    return end
  kept = [p for p in end.pending if _is_flush_waiting(turn, p)]
  turn.end = end = dataclasses.replace(end, pending=tuple(kept))
  return end


def _is_answering(turn: Turn) -> bool:
  """Whether a pull is under way: a flush round asks when all are free.

  A carried reply may take longer than the flush, and is not waited for.
  """
  if len(turn.rounds) >= turn.rules.max_open_rounds:
    return True
  return any(not r.merging for r in turn.rounds)


def _is_flush_waiting(turn: Turn, p: int) -> bool:
  """Opens the flush round of p if it can; False once p needs no more of it."""
  if turn.round_of(p) is not None or _is_answering(turn):
    return True
  if members.is_carried_under_way(turn, p):
    return True
  able = [
    learner
    for learner in turn.learners.values()
    if learner.live
    and learner.connected
    and members.has_progress(turn, learner, p)
  ]
  free = [m for m in able if members.is_free(turn, m, p)]
  num = len(free) + sum(c.key.fragment == p for c in turn.carried)
  if not num:
    return bool(able)
  rounds.open_round(
    turn, Due(p, turn.t), free, min(turn.rules.quorum, num), flush=True
  )
  return False


def _publish_exact(turn: Turn) -> None:
  """The last version of everything, to everybody, bit for bit."""
  end = turn.end
  assert end is not None
  present = [
    learner
    for learner in turn.learners.values()
    if learner.live and learner.connected
  ]
  turn.end = dataclasses.replace(
    end,
    exact=True,
    until=turn.now + turn.rules.acknowledge_s,
    awaited=tuple(learner.learner for learner in present),
  )
  for reply in turn.carried:
    replies.drop(turn, reply, ledger.END, "the run has ended")
  turn.carried = ()
  for learner in tuple(turn.learners.values()):
    if learner.asked:  # A reply that comes now is late.
      turn.put(learner._replace(asked=()))
  if not present:
    return
  for p, fragment in enumerate(turn.fragments):
    turn.emit(
      events.Publish(
        fragment=p,
        version=fragment.version,
        receivers=tuple(_last_receiver(turn, m, p) for m in present),
        exact=True,
        reason=f"fragment {p} ends at version {fragment.version.n}",
      )
    )


def _last_receiver(turn: Turn, learner: Learner, p: int) -> Receiver:
  account = turn.account(learner.learner, p)
  member = (learner.learner, learner.incarnation)
  if member in turn.fragments[p].contributors:
    return Receiver(
      *member,
      Outcome.INCLUDED,
      "",
      account.merged_round,
      account.merged_attempt,
    )
  return Receiver(*member, Outcome.NOT_ASKED)


def acknowledge(turn: Turn, event: events.Applied) -> None:
  """Notes that a learner holds the exact last version of a fragment."""
  end, learner = turn.end, turn.speaker(event)
  if end is None or not end.exact or learner is None or not event.exact:
    return  # The same version adopted earlier may have been trained on.
  p = event.fragment
  if learner.bases[p] != event.version or p in learner.exact:
    return
  if event.version != turn.fragments[p].version:
    return
  learner = turn.put(learner._replace(exact=(*learner.exact, p)))
  if len(learner.exact) == turn.rules.num_fragments:
    awaited = tuple(name for name in end.awaited if name != learner.learner)
    turn.end = dataclasses.replace(end, awaited=awaited)


def _await(turn: Turn) -> None:
  end = turn.end
  assert end is not None
  hopeful = any(turn.learners[name].live for name in end.awaited)
  if hopeful and turn.now < end.until:
    return
  accounts = {}
  for name, learner in tuple(turn.learners.items()):
    accounts[name] = tuple(
      ledger.say(account, learner.incarnation, base, counts)
      for account, base, counts in zip(
        turn.accounts[name], learner.bases, learner.counts
      )
    )
    for p in range(turn.rules.num_fragments):
      account = ledger.close(
        turn.account(name, p),
        learner.incarnation,
        learner.bases[p],
        learner.counts[p],
        None,
        ledger.END if learner.live else ledger.LOST,
      )
      turn.put_account(name, p, ledger.settle(account))
  turn.end = dataclasses.replace(
    end, finished=True, missing=end.awaited, accounts=accounts
  )
  turn.emit(finished(turn.end))


def finished(end: End) -> events.Finished:
  """What is said once a run is over, also to those who come back later."""
  missing = ", ".join(end.missing) or "nobody"
  return events.Finished(
    exit_code=end.exit_code,
    missing=end.missing,
    reason=f"{end.reason}; missing at the end: {missing}",
  )
