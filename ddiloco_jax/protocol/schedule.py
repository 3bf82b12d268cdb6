"""The pace of t, and which fragment is due when.

t follows the median training learner's step time, never the network's; a
fragment is due once a cycle, at its slot. (arXiv 2604.21428, Sec. 3.1.)
"""

import functools

from ddiloco_jax.protocol import events, membership, shards
from ddiloco_jax.protocol.quorum import average
from ddiloco_jax.protocol.state import Due, Learner, State
from ddiloco_jax.protocol.turn import Turn

# A process compiles in its first two steps: they are not timed.
NUM_UNTIMED = 2


@functools.lru_cache(maxsize=16)
def slots(num_fragments: int, cycle_steps: int) -> dict[int, int]:
  """Offset in the cycle -> fragment: t_p = floor(p * H / P), all distinct."""
  return {p * cycle_steps // num_fragments: p for p in range(num_fragments)}


def reported(turn: Turn, event: events.Reported) -> None:
  """A process is at a new step boundary: the one event of every step."""
  old = turn.speaker(event)
  if old is None:
    turn.count("fenced")
    return
  steps = event.step - old.step
  step_s = old.step_s
  if steps > 0:
    turn.stepped = True
    step_s = _step_s(turn, old, steps)
    if old.reported_t != turn.t:
      turn.num_reported += 1
  training = steps > 0 or event.waiting or event.exhausted
  rules = turn.rules
  turn.quiet = (
    old.live
    and old.training
    and not old.fresh
    and not rules.wait_for_publication
    and rules.members == "live"
  )
  num_steps, tokens = max(event.counts)
  if None in old.adopted_at:
    old = old._replace(adopted_at=_adopted_at(old, event))
  turn.put(
    old._replace(
      live=True,
      connected=True,  # A report comes by the control stream.
      training=training or (old.live and old.training),
      heard_at=turn.now,
      step=max(event.step, old.step),
      step_s=step_s,
      stepped_at=turn.now if steps > 0 else old.stepped_at,
      untimed=old.untimed and steps <= 0,
      num_steps=old.num_steps + max(steps, 0),
      reported_t=turn.t if steps > 0 else old.reported_t,
      counts=event.counts,
      positions=event.positions,
      boundaries=event.boundaries,
      waiting=event.waiting,
      exhausted=event.exhausted,
      metrics=event.metrics,
      fresh=min(event.counts)[0] < 1,
      heard=True,
      peak_tokens=max(old.peak_tokens, tokens / max(num_steps, 1)),
    )
  )
  shards.reported(turn, old, event)
  if not (old.live and old.training):
    membership.wake_scan(turn, turn.now + rules.lease_s)


def _step_s(turn: Turn, old: Learner, steps: int) -> float:
  """A learner's average time per step, after so many new ones."""
  is_timed = old.live and not (old.untimed or old.waiting)
  if old.num_steps < NUM_UNTIMED or not is_timed:
    return old.step_s
  # A plain mean until the average is as long as its weight says.
  num_timed = old.num_steps - NUM_UNTIMED + steps
  share = 1 - (1 - turn.rules.step_weight) ** min(steps, 1000)
  share = max(share, steps / num_timed)
  sample_s = (turn.now - old.stepped_at) / steps
  return average(old.step_s or None, sample_s, share)


def _adopted_at(
  learner: Learner, event: events.Reported
) -> tuple[int | None, ...]:
  """Where an adoption's step is not known, counts tell it."""
  return tuple(
    event.step - counts.steps if at is None and base is not None else at
    for at, base, counts in zip(learner.adopted_at, learner.bases, event.counts)
  )


def pace_at(turn: State | Turn) -> float | None:
  """When t may advance; None while too few learners reported a new step."""
  rules = turn.rules
  if turn.end is not None:
    return None
  if rules.wait_for_publication or rules.max_ahead:
    return None
  if turn.num_reported < rules.quorum:
    return None
  if turn.step_s is None:
    return turn.now if turn.num_reported >= turn.num_pacing else None
  return turn.t_due


def advance(turn: Turn) -> None:
  """Moves t as far as the pace allows, and queues what becomes due."""
  rules = turn.rules
  if turn.end is not None:
    return
  if rules.wait_for_publication or rules.max_ahead:
    _follow_indices(turn)
    return
  at = pace_at(turn)
  if at is None or turn.now < at:
    return
  step_s = turn.step_s or 0.0
  # At most one step of credit: t never runs after a long gap to catch up.
  turn.t_due = max(turn.t_due, turn.now - step_s) + step_s
  _tick(turn)


def _follow_indices(turn: Turn) -> None:
  """t is the K-th largest cumulative step index of the live learners."""
  k = turn.rules.quorum
  if not turn.stepped:
    return
  indices = sorted(
    (learner.step for learner in turn.learners.values() if learner.live),
    reverse=True,
  )
  if len(indices) < k:
    return
  target = min(indices[k - 1], turn.rules.num_syncer_steps or indices[k - 1])
  # A cycle makes every fragment due: a longer jump would not do more.
  turn.t = max(turn.t, target - turn.rules.cycle_steps)
  while turn.t < target:
    _tick(turn)


def _tick(turn: Turn) -> None:
  turn.t += 1
  turn.num_reported = 0
  cycle = turn.rules.cycle_steps
  fragment = slots(turn.rules.num_fragments, cycle).get(turn.t % cycle)
  if fragment is None:
    return
  if any(due.fragment == fragment for due in turn.queue):
    turn.count("slot_missed")
    return
  turn.queue = (*turn.queue, Due(fragment, turn.t))
