"""Who may be asked for a fragment: the possible members of its next round.

(arXiv 2604.21428, Sec. 3.1.)
"""

from ddiloco_jax.protocol import membership
from ddiloco_jax.protocol.state import Due, Learner, Round, State
from ddiloco_jax.protocol.turn import Turn


def find_round(state: State | Turn, fragment: int) -> Round | None:
  """The open round of a fragment, if there is one."""
  return next((r for r in state.rounds if r.fragment == fragment), None)


def is_member(turn: Turn, learner: Learner, p: int) -> bool:
  """Whether a learner is eligible for the next round of fragment p."""
  rules = turn.rules
  if not (learner.live and learner.training and learner.connected):
    return False
  if rules.wait_for_publication:
    if not any(boundary[0] == p for boundary in learner.boundaries):
      return False
  elif rules.members == "reported" and learner.reported_t < turn.t - 1:
    return False
  return has_progress(turn, learner, p) and is_free(turn, learner, p)


def has_progress(turn: Turn, learner: Learner, p: int) -> bool:
  """Whether it made a step from a base that no merge has used already."""
  base = learner.bases[p]
  if base is None or learner.counts[p].steps < 1:
    return False
  if not membership.is_valid_base(turn, p, base):
    return False  # It was rolled back, and is about to be replaced.
  return base.n >= turn.account(learner.learner, p).merged_n


def is_free(turn: Turn, learner: Learner, p: int) -> bool:
  """Whether it may answer a pull of fragment p now."""
  if len(learner.asked) >= learner.max_replies:
    return False
  if turn.is_asked(learner, p) is not None:
    return False
  return not any(
    reply.key.fragment == p and reply.key.learner == learner.learner
    for reply in turn.carried
  )


def quorum_of(turn: Turn, due: Due, members: list[Learner]) -> int | None:
  """The replies that a round of these members needs; None: not to be opened."""
  k = turn.rules.quorum
  num = len(members) + sum(r.key.fragment == due.fragment for r in turn.carried)
  if not turn.rules.wait_for_publication:
    return k if num >= k else None
  # K learners have come to the boundary; one that joined behind it has no
  # copy, and must not hold up those that wait there.
  reached = sum(
    learner.live and learner.step >= due.slot
    for learner in turn.learners.values()
  )
  return min(k, num) if num and reached >= k else None


def is_carried_under_way(turn: Turn, p: int) -> bool:
  return any(
    asked.carried and asked.fragment == p
    for learner in turn.learners.values()
    for asked in learner.asked
  )
