"""What an operator sees of a run.

(arXiv 2604.21428, Sec. 3; live, training, eligible and contributing are four
figures.)
"""

import dataclasses

from ddiloco_jax.protocol import ending, ledger, waiting
from ddiloco_jax.protocol.events import Counts, Outcome, Version
from ddiloco_jax.protocol.state import Learner, State


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
  waiting_for: str  # One sentence; `waiting_kind` is its word.
  waiting_kind: str
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
  waits = waiting.wait(state, now)
  steps_left = max(0, rules.num_syncer_steps - state.t)
  return Status(
    epoch=state.epoch,
    time_s=now,
    t=state.t,
    num_syncer_steps=rules.num_syncer_steps,
    phase=phase(state),
    waiting_for=waits.sentence,
    waiting_kind=waits.kind,
    eta_s=steps_left * (state.step_s or 0.0),
    num_live=state.num_live,
    num_training=state.num_training,
    num_eligible=len(waiting.eligible(state, waiting.next_fragment(state))),
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
        phase=waiting.round_phase(r),
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
  """Why a learner does not take part, or how it came to."""
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
  return learner.recovered
