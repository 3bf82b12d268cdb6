"""What a run waits for, as a sentence and as a word.

Status, logs and metrics use the same ones. (arXiv 2604.21428, Sec. 3.)
"""

from typing import NamedTuple

from ddiloco_jax.protocol import members, schedule, snapshots
from ddiloco_jax.protocol.state import Cut, Round, State
from ddiloco_jax.protocol.turn import Turn


class Wait(NamedTuple):
  """What a run waits for.

  Attributes:
    kind: A word that stays, for metrics: learners, steps, replies, retry,
      eligible, grace, merging, slot, snapshot, flush, acknowledgements or
      nothing.
    sentence: For people; it names what is missing.
  """

  kind: str
  sentence: str


def wait(state: State, now: float) -> Wait:
  """What the run waits for now."""
  end, k = state.end, state.rules.quorum
  if end is not None:
    return _waiting_at_the_end(state)
  if state.cut is not None and snapshots.holds_rounds(Turn(state)):
    return Wait("snapshot", _waiting_for_cut(state, state.cut))
  live = [m for m in state.learners.values() if m.live]
  if len(live) < k:
    return Wait(
      "learners",
      f"waits for {_more(k - len(live), 'learner')}: quorum {k}, {len(live)} "
      f"live{_names([m.learner for m in live])}",
    )
  training = [m for m in live if m.training]
  if len(training) < k:
    idle = [m.learner for m in live if not m.training]
    return Wait(
      "steps",
      f"waits for {_more(k - len(training), 'learner')} to take a step: quorum "
      f"{k}, {len(live)} live, {len(training)} training"
      f"{_names([m.learner for m in training])}; no new step of "
      f"{', '.join(idle)}",
    )
  for r in state.rounds:
    if not r.merging and r.quorum_at is None:
      missing = max(0, r.quorum - len(r.replies))
      names = [member.learner for member in r.waiting]
      what = _more(missing, "reply") if missing else "a reply with tokens"
      return Wait(
        "replies",
        f"round {r.round} of fragment {r.fragment} waits for {what}: quorum "
        f"{r.quorum}, {len(r.replies)} of {len(r.members)} members replied"
        f"{_names(names, 'missing ')}",
      )
  return _waiting_for_slot(state, now)


def _waiting_for_cut(state: State, cut: Cut) -> str:
  if not cut.marked:
    return (
      f"snapshot {cut.snapshot} waits for {_more(len(state.rounds), 'round')} "
      "to close; none opens meanwhile"
    )
  if not cut.copied:
    return f"snapshot {cut.snapshot}: the syncer copies its part"
  return (
    f"snapshot {cut.snapshot} waits for learners to adopt its clock"
    f"{_names([member.learner for member in cut.awaited])}"
  )


def _waiting_for_slot(state: State, now: float) -> Wait:
  k = state.rules.quorum
  for due in state.queue:
    if len(state.rounds) >= state.rules.max_open_rounds:
      break
    if due.not_before > now:
      return Wait(
        "retry",
        f"fragment {due.fragment} is tried again in "
        f"{due.not_before - now:.1f} s (attempt {due.attempt})",
      )
    able = eligible(state, due.fragment)
    if len(able) < k and members.find_round(state, due.fragment) is None:
      return Wait(
        "eligible",
        f"fragment {due.fragment} is due and waits for "
        f"{_more(k - len(able), 'eligible learner')}: quorum {k}, {len(able)} "
        f"eligible{_names(able)}",
      )
  if state.rounds:
    r = state.rounds[0]
    return Wait(
      round_phase(r),
      f"round {r.round} of fragment {r.fragment} is in its {round_phase(r)} "
      f"phase with {len(r.replies)} of {len(r.members)} replies",
    )
  return Wait(
    "slot", f"fragment {next_fragment(state)} is due next; t is {state.t}"
  )


def _waiting_at_the_end(state: State) -> Wait:
  end = state.end
  assert end is not None
  if end.finished:
    return Wait("nothing", f"nothing: the run has finished ({end.reason})")
  if end.exact:
    return Wait(
      "acknowledgements",
      f"waits for {_more(len(end.awaited), 'learner')} to adopt the result"
      f"{_names(list(end.awaited))}: {end.reason}",
    )
  return Wait(
    "flush",
    f"the run ends ({end.reason}): {len(end.pending)} flush rounds to come, "
    f"{len(state.rounds)} under way",
  )


def next_fragment(state: State) -> int:
  """The fragment that is due, or comes due next."""
  if state.queue:
    return state.queue[0].fragment
  cycle = state.rules.cycle_steps
  slots = schedule.slots(state.rules.num_fragments, cycle)
  ahead = (slots.get((state.t + d) % cycle) for d in range(1, cycle + 1))
  return next(p for p in ahead if p is not None)


def eligible(state: State, fragment: int) -> list[str]:
  """Learners that a round of the fragment would ask now."""
  turn = Turn(state)
  return [
    learner.learner
    for learner in state.learners.values()
    if members.is_member(turn, learner, fragment)
  ]


def round_phase(r: Round) -> str:
  """collecting, grace or merging."""
  if r.merging:
    return "merging"
  return "collecting" if r.quorum_at is None else "grace"


def _more(num: int, noun: str) -> str:
  if num != 1:
    noun = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
  return f"{num} more {noun}"


def _names(names: list[str], prefix: str = "") -> str:
  if not names:
    return ""
  shown = names[:8] + ([f"and {len(names) - 8} more"] if len(names) > 8 else [])
  return f" ({prefix}{', '.join(shown)})"
