"""Replies whose bytes are on the way: moving, broken, carried, or stalled.

Deadlines follow progress: a slow link is waited for, a dead one is not.
(arXiv 2604.21428, Sec. 3.1; the carrying is ours.)
"""

from ddiloco_jax.protocol import events, membership
from ddiloco_jax.protocol.state import Asked, Learner
from ddiloco_jax.protocol.turn import Turn


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
  at = asked.alive_at + turn.deadline_s()
  if turn.carried_check_at is None or at < turn.carried_check_at:
    turn.carried_check_at = at


def expire_carried(turn: Turn) -> None:
  """Stops waiting for carried uploads that do not begin, or do not move."""
  if turn.carried_check_at is None or turn.now < turn.carried_check_at:
    return
  turn.carried_check_at = None
  for learner in tuple(turn.learners.values()):
    for asked in learner.asked:
      if not asked.carried:
        continue
      if turn.now - asked.alive_at < turn.deadline_s():
        watch_carried(turn, asked)
        continue
      turn.count("carry_expired")
      _put_asked(turn, turn.learners[learner.learner], asked, None)
      turn.settle(learner.learner, asked.fragment)
