"""What an operator sees of a run, and the sentence that says what it waits for.

(arXiv 2604.21428, Sec. 3; live, training, eligible and contributing are four
figures.)
"""

import dataclasses

from ddiloco_jax.protocol import ending, ledger, members, schedule
from ddiloco_jax.protocol.events import Counts, Outcome, Version
from ddiloco_jax.protocol.state import Learner, Round, State
from ddiloco_jax.protocol.turn import Turn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
  learner: str
  incarnation: int
  live: bool
  training: bool
  contributing: bool
  exhausted: bool
  step: int
  step_s: float
  silent_s: float
  metrics: tuple[tuple[str, float], ...]
  note: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FragmentStatus:
  fragment: int
  version: Version
  realised_h: float
  num_contributors: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundStatus:
  fragment: int
  round: int
  attempt: int
  num_members: int
  num_replies: int
  phase: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Book:
  """Tokens of a run under one name: mean over fragments, by parameters."""

  name: str
  tokens: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
  """The message Status."""

  epoch: int
  time_s: float
  t: int
  num_syncer_steps: int
  phase: str
  waiting_for: str
  eta_s: float
  num_live: int
  num_training: int
  num_eligible: int
  num_contributing: int
  step_s: float
  quorum_s: float
  sync_s: float
  learners: tuple[LearnerStatus, ...]
  fragments: tuple[FragmentStatus, ...]
  rounds: tuple[RoundStatus, ...]
  books: tuple[Book, ...]
  counters: dict[str, int]
  alarms: tuple[str, ...]
  run_id: str = ""  # These three are the syncer object's to fill in.
  bytes_up: int = 0
  bytes_down: int = 0


def status(state: State, now: float) -> Status:
  """The state of a run at a moment.

  Args:
    state: Of the machine.
    now: Seconds since the run began, for what is silent how long.
  """
  rules = state.rules
  steps_left = max(0, rules.num_syncer_steps - state.t)
  return Status(
    epoch=state.epoch,
    time_s=now,
    t=state.t,
    num_syncer_steps=rules.num_syncer_steps,
    phase=phase(state),
    waiting_for=waiting_for(state, now),
    eta_s=steps_left * (state.step_s or 0.0),
    num_live=state.num_live,
    num_training=state.num_training,
    num_eligible=len(_eligible(state, next_fragment(state))),
    num_contributing=len(_contributors(state)),
    step_s=state.step_s or 0.0,
    quorum_s=state.quorum_s or 0.0,
    sync_s=state.sync_s or 0.0,
    learners=tuple(
      _learner(state, learner, now) for learner in state.learners.values()
    ),
    fragments=tuple(
      FragmentStatus(
        fragment=p,
        version=fragment.version,
        realised_h=realised_h(state, p),
        num_contributors=len(fragment.contributors),
      )
      for p, fragment in enumerate(state.fragments)
    ),
    rounds=tuple(
      RoundStatus(
        fragment=r.fragment,
        round=r.round,
        attempt=r.attempt,
        num_members=len(r.members),
        num_replies=len(r.replies),
        phase=_round_phase(r),
      )
      for r in state.rounds
    ),
    books=books(state),
    counters=dict(state.counters),
    alarms=state.alarms,
  )


def phase(state: State) -> str:
  """waiting, training, flushing or finished."""
  if state.end is not None:
    return "finished" if state.end.finished else "flushing"
  return "training" if state.num_training >= state.rules.quorum else "waiting"


def waiting_for(state: State, now: float) -> str:
  """One sentence: what the run waits for, naming what is missing."""
  end, k = state.end, state.rules.quorum
  if end is not None:
    return _waiting_at_the_end(state)
  live = [m for m in state.learners.values() if m.live]
  if len(live) < k:
    return (
      f"waits for {_more(k - len(live), 'learner')}: quorum {k}, {len(live)} "
      f"live{_names([m.learner for m in live])}"
    )
  training = [m for m in live if m.training]
  if len(training) < k:
    idle = [m.learner for m in live if not m.training]
    return (
      f"waits for {_more(k - len(training), 'learner')} to take a step: quorum "
      f"{k}, {len(live)} live, {len(training)} training"
      f"{_names([m.learner for m in training])}; no new step of "
      f"{', '.join(idle)}"
    )
  for r in state.rounds:
    if not r.merging and r.quorum_at is None:
      missing = max(0, r.quorum - len(r.replies))
      names = [member.learner for member in r.waiting]
      what = _more(missing, "reply") if missing else "a reply with tokens"
      return (
        f"round {r.round} of fragment {r.fragment} waits for {what}: quorum "
        f"{r.quorum}, {len(r.replies)} of {len(r.members)} members replied"
        f"{_names(names, 'missing ')}"
      )
  return _waiting_for_slot(state, now)


def _waiting_for_slot(state: State, now: float) -> str:
  k = state.rules.quorum
  for due in state.queue:
    if len(state.rounds) >= state.rules.max_open_rounds:
      break
    if due.not_before > now:
      return (
        f"fragment {due.fragment} is tried again in "
        f"{due.not_before - now:.1f} s (attempt {due.attempt})"
      )
    able = _eligible(state, due.fragment)
    if len(able) < k and members.find_round(state, due.fragment) is None:
      return (
        f"fragment {due.fragment} is due and waits for "
        f"{_more(k - len(able), 'eligible learner')}: quorum {k}, {len(able)} "
        f"eligible{_names(able)}"
      )
  if state.rounds:
    r = state.rounds[0]
    return (
      f"round {r.round} of fragment {r.fragment} is in its {_round_phase(r)} "
      f"phase with {len(r.replies)} of {len(r.members)} replies"
    )
  return f"fragment {next_fragment(state)} is due next; t is {state.t}"


def _waiting_at_the_end(state: State) -> str:
  end = state.end
  assert end is not None
  if end.finished:
    return f"nothing: the run has finished ({end.reason})"
  if end.exact:
    return (
      f"waits for {_more(len(end.awaited), 'learner')} to adopt the result"
      f"{_names(list(end.awaited))}: {end.reason}"
    )
  return (
    f"the run ends ({end.reason}): {len(end.pending)} flush rounds to come, "
    f"{len(state.rounds)} under way"
  )


def next_fragment(state: State) -> int:
  """The fragment that is due, or comes due next."""
  if state.queue:
    return state.queue[0].fragment
  cycle = state.rules.cycle_steps
  slots = schedule.slots(state.rules.num_fragments, cycle)
  ahead = (slots.get((state.t + d) % cycle) for d in range(1, cycle + 1))
  return next(p for p in ahead if p is not None)


def realised_h(state: State, fragment: int) -> float:
  """Mean c_steps in accepted replies of the median learner; 0 without any."""
  means = sorted(
    (
      account.h_steps / account.h_replies
      for account in (row[fragment] for row in state.accounts.values())
      if account.h_replies
    ),
    reverse=True,
  )
  return means[(len(means) - 1) // 2] if means else 0.0


def account_totals(state: State, learner: str, fragment: int) -> ledger.Totals:
  """The books of one (learner, fragment), the open span included."""
  process = state.learners[learner]
  return ledger.totals(
    state.accounts[learner][fragment],
    process.incarnation,
    process.bases[fragment],
    process.counts[fragment],
  )


def books(state: State) -> tuple[Book, ...]:
  """Tokens of the run: reported, merged, pending, discarded/REASON."""
  num = state.rules.num_fragments
  rows: dict[str, list[int]] = {
    name: [0] * num for name in ("reported", "merged", "pending")
  }
  for name in state.learners:
    for p in range(num):
      totals = account_totals(state, name, p)
      parts: list[tuple[str, Counts]] = [
        ("reported", totals.reported),
        ("merged", totals.merged),
        ("pending", totals.pending),
        *((f"discarded/{book}", c) for book, c in totals.discarded),
      ]
      for book, counts in parts:
        rows.setdefault(book, [0] * num)[p] += counts.tokens
  params = state.rules.fragment_params
  return tuple(
    Book(name=name, tokens=ending.mean_over_fragments(row, params))
    for name, row in rows.items()
  )


def _contributors(state: State) -> set[str]:
  if state.newest_merge < 0:
    return set()
  contributors = state.fragments[state.newest_merge].contributors
  return {member.learner for member in contributors}


def _eligible(state: State, fragment: int) -> list[str]:
  turn = Turn(state)
  return [
    learner.learner
    for learner in state.learners.values()
    if members.is_member(turn, learner, fragment)
  ]


def _learner(state: State, learner: Learner, now: float) -> LearnerStatus:
  return LearnerStatus(
    learner=learner.learner,
    incarnation=learner.incarnation,
    live=learner.live,
    training=learner.training,
    contributing=learner.learner in _contributors(state),
    exhausted=learner.exhausted,
    step=learner.step,
    step_s=learner.step_s,
    silent_s=max(0.0, now - learner.heard_at),
    metrics=learner.metrics,
    note=_note(state, learner, now),
  )


def _note(state: State, learner: Learner, now: float) -> str:
  """Why a learner does not take part, when it does not."""
  silent_s = max(0.0, now - learner.heard_at)
  if learner.gone:
    return "it left, or another process took its place"
  if not learner.live:
    return f"silent for {silent_s:.0f} s; the lease is {state.rules.lease_s} s"
  if not learner.connected:
    return "its control stream is closed"
  if learner.exhausted:
    return "its data is used up"
  if not learner.training:
    if not learner.num_steps:
      return "it has not reported a step yet"
    return f"no new step for {now - learner.stepped_at:.0f} s"
  answers = [
    row.answers[-1] for row in state.accounts[learner.learner] if row.answers
  ]
  newest = max(answers, key=lambda a: (a.incarnation, a.round), default=None)
  if newest is not None and newest.outcome in (Outcome.REFUSED, Outcome.LATE):
    return f"its last reply was {newest.outcome}: {newest.reason}"
  return ""


def _round_phase(r: Round) -> str:
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
