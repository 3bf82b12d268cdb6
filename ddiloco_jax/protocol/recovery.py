"""Which learner a new process may take its inner optimizer's state from.

(arXiv 2604.21428, App. E.)
"""

from collections.abc import Collection

from ddiloco_jax.protocol import events, membership
from ddiloco_jax.protocol.state import Learner, State
from ddiloco_jax.protocol.turn import Turn


def donor_for(
  state: State | Turn,
  learner: str,
  preferred: str = "",
  but_not: Collection[str] = (),
) -> events.Donor | None:
  """A healthy learner that serves its state; None while there is none.

  One that has applied all that is published comes first, then the one with the
  most steps. A run without a merge has no progress to share: its first learners
  all begin alike.

  Args:
    learner: Who asks.
    preferred: Taken, as long as it is healthy.
    but_not: Not taken: they gave nothing.
  """
  if not any(fragment.version.n for fragment in state.fragments):
    return None
  excluded = {learner, *but_not}
  donors = [
    m
    for m in state.learners.values()
    if m.learner not in excluded and _is_healthy(m)
  ]
  if not donors:
    return None
  best = max(
    donors,
    key=lambda m: (
      m.learner == preferred,
      not m.exhausted,
      _has_applied_all(state, m),
      m.num_steps,
      m.learner,
    ),
  )
  return events.Donor(best.learner, best.state_address)


def recovered(turn: Turn, event: events.Recovered) -> None:
  """Keeps, for people, where a process has its state from."""
  learner = turn.speaker(event)
  if learner is None:
    return
  membership.hear(turn, learner)
  learner = turn.learners[event.learner]
  sentence = f"inner state from {event.source}"
  if event.donor:
    sentence += f" {event.donor}"
  if event.reason:
    sentence += f": {event.reason}"
  if learner.recovered != sentence:  # A reconnect says it again.
    turn.count(f"recovered_{event.source}")
    turn.put(learner._replace(recovered=sentence))


def _is_healthy(learner: Learner) -> bool:
  return bool(
    learner.live
    and learner.training
    and learner.connected
    and learner.state_address
    and None not in learner.bases
  )


def _has_applied_all(state: State | Turn, learner: Learner) -> bool:
  return all(
    base is not None and base.n >= fragment.version.n
    for base, fragment in zip(learner.bases, state.fragments)
  )
