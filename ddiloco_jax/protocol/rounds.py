"""A round: frozen members are pulled, K replies close it after the grace.

It ends in a merge, or is given up at its deadline and tried again.
(arXiv 2604.21428, Sec. 3.1, Eq. 3.)
"""

from ddiloco_jax.protocol import (
  events,
  guards,
  ledger,
  members,
  replies,
  uploads,
)
from ddiloco_jax.protocol.events import Outcome, Receiver
from ddiloco_jax.protocol.state import Asked, Due, Learner, Member, Round
from ddiloco_jax.protocol.turn import Turn


def open_due(turn: Turn) -> None:
  """Opens a round for every due fragment that may have one now."""
  if not turn.queue:
    return
  for due in turn.queue:
    if len(turn.rounds) >= turn.rules.max_open_rounds:
      return
    if turn.now < due.not_before or turn.round_of(due.fragment) is not None:
      continue
    if turn.num_live + len(turn.carried) < turn.rules.quorum:
      return
    able = [
      learner
      for learner in turn.learners.values()
      if members.is_member(turn, learner, due.fragment)
    ]
    needed = members.quorum_of(turn, due, able)
    if needed is not None:
      turn.queue = tuple(d for d in turn.queue if d is not due)
      open_round(turn, due, able, needed)


def open_round(
  turn: Turn,
  due: Due,
  learners: list[Learner],
  needed: int,
  *,
  flush: bool = False,
) -> None:
  """Freezes the members and pulls from each."""
  p, number, attempt = due.fragment, due.round, due.attempt
  if number < 0:
    number, attempt = turn.next_round, 0
    turn.next_round += 1
  frozen = tuple(Member(m.learner, m.incarnation) for m in learners)
  r = Round(
    fragment=p,
    round=number,
    attempt=attempt,
    slot=due.slot,
    opened_at=turn.now,
    deadline=turn.now + turn.deadline_s(),
    quorum=needed,
    members=frozen,
    waiting=frozen,
    flush=flush,
  )
  turn.rounds = (*turn.rounds, r)
  reason = (
    f"t={turn.t}: fragment {p} is due; round {number} attempt {attempt} asks "
    f"{len(frozen)} members, quorum {needed}"
  )
  for learner in learners:
    _pull(turn, learner, r, reason)
  replies.take_carried(turn, p)


def _pull(turn: Turn, learner: Learner, r: Round, reason: str) -> None:
  asked = Asked(r.fragment, r.round, r.attempt, turn.now)
  turn.put(learner._replace(asked=(*learner.asked, asked)))
  account = turn.account(learner.learner, r.fragment)
  key = (learner.incarnation, r.round, r.attempt)
  turn.put_account(
    learner.learner,
    r.fragment,
    account._replace(asked=(*account.asked[-2:], key)),
  )
  turn.emit(
    events.Pull(
      learner=learner.learner,
      incarnation=learner.incarnation,
      fragment=r.fragment,
      round=r.round,
      attempt=r.attempt,
      reason=reason,
    )
  )


def progress(turn: Turn) -> None:
  """Closes, or gives up, every open round whose time has come."""
  for r in turn.rounds:
    if r.merging:
      continue
    if r.quorum_at is not None:
      assert r.grace_end is not None
      if not r.waiting or turn.now >= r.grace_end:
        _close(turn, r)
    elif turn.now >= r.deadline:
      give_up(turn, r, "its deadline has passed")
    elif _is_hopeless(turn, r):
      give_up(turn, r, "no member is left that could reply")


def _is_hopeless(turn: Turn, r: Round) -> bool:
  if r.waiting or len(r.replies) >= r.quorum:
    return False
  return not members.is_carried_under_way(turn, r.fragment)


def _close(turn: Turn, r: Round) -> None:
  """Judges the replies against each other, and merges what is left."""
  r = replies.refuse_outliers(turn, r)
  if r.quorum_at is None:
    return
  _dismiss(turn, r)
  version = events.Version(turn.epoch, turn.fragments[r.fragment].version.n + 1)
  turn.put_round(r, r._replace(waiting=(), merging=True))
  turn.emit(
    events.Merge(
      fragment=r.fragment,
      round=r.round,
      attempt=r.attempt,
      version=version,
      inputs=tuple(
        events.MergeInput(reply.key, reply.weight) for reply in r.replies
      ),
      reason=(
        f"round {r.round} of fragment {r.fragment}: {len(r.replies)} replies, "
        f"quorum {r.quorum} after {r.quorum_at - r.opened_at:.3f} s, waited "
        f"{turn.now - r.quorum_at:.3f} s more for {len(r.members)} members"
      ),
    )
  )


def _dismiss(turn: Turn, r: Round) -> None:
  """Carries the replies that are still to be expected; others will be late.

  Those whose bytes move. If the round is merged, also those that have not begun
  yet: a link may take longer to bring a pull, or the first byte, than fast
  peers to close the round. A round that is given up takes its pulls back.
  """
  for name, _ in r.waiting:
    learner = turn.learners[name]
    asked = turn.is_asked(learner, r.fragment)
    if asked is None or asked.round != r.round:
      continue
    others = tuple(a for a in learner.asked if a is not asked)
    may_come = asked.moved_at is not None or r.quorum_at is not None
    if may_come and turn.now - asked.alive_at < turn.deadline_s():
      others = (*others, asked._replace(carried=True))
      uploads.watch_carried(turn, asked)
    turn.put(learner._replace(asked=others))
    turn.settle(name, r.fragment)


def give_up(turn: Turn, r: Round, why: str) -> None:
  """Ends a round without a merge; its fragment is due again after a step."""
  p = r.fragment
  _dismiss(turn, r)
  turn.put_round(r, None)
  book = ledger.GIVEN_UP if turn.end is None else ledger.END
  for reply in r.replies:
    replies.drop(turn, reply, book, f"round {r.round}: {why}")
  reason = (
    f"round {r.round} attempt {r.attempt} of fragment {p} is given up after "
    f"{turn.now - r.opened_at:.3f} s: {why}; {len(r.replies)} of "
    f"{len(r.members)} members replied, quorum {r.quorum}"
  )
  turn.count("round_given_up")
  turn.emit(
    events.GiveUp(
      fragment=p,
      round=r.round,
      attempt=r.attempt,
      receivers=tuple(
        Receiver(m.learner, m.incarnation, Outcome.REFUSED, why)
        for m in r.members
      ),
      reason=reason,
    )
  )
  if r.refused and not r.replies:
    guards.all_refused(turn, r)
  elif any(refusal.kind == "outlier" for refusal in r.refused):
    guards.starved(turn, r)
  if turn.end is None:
    _requeue(turn, r)


def due_again(r: Round, not_before: float = 0.0) -> Due:
  """The next attempt of a round."""
  return Due(r.fragment, r.slot, r.round, r.attempt + 1, not_before)


def _requeue(turn: Turn, r: Round) -> None:
  wait_s = turn.step_s or turn.rules.min_deadline_s
  due = due_again(r, turn.now + wait_s)
  others = tuple(d for d in turn.queue if d.fragment != r.fragment)
  if len(others) < len(turn.queue):
    turn.count("slot_missed")
  turn.queue = (*others, due)
