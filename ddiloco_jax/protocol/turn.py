"""One step of the machine at work: a private copy that becomes the next State.

Everything that decides writes through a Turn, so that cached counts (who is
live, trains, sets the pace) can never disagree with what they count.
"""

import bisect
import operator
from typing import Any

from ddiloco_jax.protocol import ledger
from ddiloco_jax.protocol.events import (
  Alarm,
  Effect,
  LearnerEvent,
  Publish,
  Receiver,
)
from ddiloco_jax.protocol.quorum import average, median
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.protocol.state import (
  Asked,
  Cut,
  Due,
  End,
  FragmentState,
  Learner,
  Reply,
  Round,
  State,
  Sync,
)

# So many newest alarms are kept for the status.
MAX_ALARMS = 8

_FIELDS = State._fields
_values = operator.attrgetter(*_FIELDS)


class Turn:
  """The fields of State, writable, and the effects decided so far."""

  __slots__ = (*_FIELDS, "_owned", "effects", "quiet", "stepped")

  rules: Rules
  epoch: int
  starts: tuple[tuple[int, ...], ...]
  fragments: tuple[FragmentState, ...]
  now: float
  t: int
  t_due: float
  num_events: int
  num_reported: int
  learners: dict[str, Learner]
  accounts: dict[str, tuple[ledger.Account, ...]]
  accepted: dict[int, int]
  rounds: tuple[Round, ...]
  queue: tuple[Due, ...]
  carried: tuple[Reply, ...]
  syncs: dict[int, Sync]
  step_times: tuple[float, ...]
  step_s: float | None
  quorum_s: float | None
  sync_s: float | None
  num_live: int
  num_training: int
  num_pacing: int
  num_exhausted: int
  scan_at: float | None
  carried_check_at: float | None
  lacking_since: float | None
  has_joined: bool
  newest_merge: int
  next_round: int
  next_incarnation: int
  next_snapshot: int
  cut: Cut | None
  end: End | None
  counters: dict[str, int]
  alarms: tuple[str, ...]

  def __init__(self, state: State):
    for name, value in zip(_FIELDS, state):
      setattr(self, name, value)
    self.effects: list[Effect] = []
    self._owned: set[str] = set()
    self.stepped = False  # A learner took a step.
    self.quiet = False  # Nothing that makes a learner eligible changed.

  def freeze(self) -> State:
    return State._make(_values(self))

  def own(self, name: str) -> dict[Any, Any]:
    """A dict field of the state, copied once so that it may be written."""
    if name not in self._owned:
      self._owned.add(name)
      setattr(self, name, dict(getattr(self, name)))
    return getattr(self, name)

  def emit(self, effect: Effect) -> None:
    self.effects.append(effect)

  def count(self, counter: str) -> None:
    counters = self.own("counters")
    counters[counter] = counters.get(counter, 0) + 1

  def alarm(self, kind: str, reason: str) -> None:
    self.emit(Alarm(kind=kind, reason=reason))
    self.alarms = (*self.alarms[1 - MAX_ALARMS :], f"{kind}: {reason}")
    self.count(f"alarm/{kind}")

  def speaker(self, event: LearnerEvent) -> Learner | None:
    """The process that an event came from; None if it is over."""
    learner = self.learners.get(event.learner)
    if learner is None or learner.gone:
      return None
    return learner if learner.incarnation == event.incarnation else None

  def put(self, new: Learner) -> Learner:
    """Stores a learner and keeps every cached count in step with it."""
    learners = self.own("learners")
    old = learners.get(new.learner)
    pacing = new.live and new.training and not new.exhausted
    pacing_s = new.step_s if pacing else 0.0
    if old is not None:
      self._tally(old, -1)
    if pacing_s != new.pacing_s:
      times = list(self.step_times)
      if new.pacing_s:
        del times[bisect.bisect_left(times, new.pacing_s)]
      if pacing_s:
        bisect.insort(times, pacing_s)
      new = new._replace(pacing_s=pacing_s)
      self.step_times = tuple(times)
      if times:
        fastest = self.rules.pace == "fastest"
        self.step_s = times[0] if fastest else median(times)
    learners[new.learner] = new
    self._tally(new, 1)
    return new

  def _tally(self, learner: Learner, sign: int) -> None:
    if learner.live:
      self.num_live += sign
      if learner.training:
        self.num_training += sign
        if not learner.exhausted:
          self.num_pacing += sign
      if learner.exhausted:
        self.num_exhausted += sign

  def account(self, learner: str, fragment: int) -> ledger.Account:
    return self.accounts[learner][fragment]

  def put_account(
    self, learner: str, fragment: int, account: ledger.Account
  ) -> None:
    row = list(self.accounts[learner])
    row[fragment] = account
    self.own("accounts")[learner] = tuple(row)

  def put_fragment(self, fragment: int, new: FragmentState) -> None:
    rows = list(self.fragments)
    rows[fragment] = new
    self.fragments = tuple(rows)

  def put_round(self, old: Round, new: Round | None) -> None:
    """Replaces an open round, or removes it."""
    self.rounds = tuple(
      kept
      for kept in (new if r is old else r for r in self.rounds)
      if kept is not None
    )

  def round_of(self, fragment: int) -> Round | None:
    for r in self.rounds:
      if r.fragment == fragment:
        return r
    return None

  def is_asked(self, learner: Learner, fragment: int) -> Asked | None:
    for asked in learner.asked:
      if asked.fragment == fragment:
        return asked
    return None

  def deadline_s(self) -> float:
    """What a round, or a stalled upload, is given."""
    return max(self.rules.min_deadline_s, 10 * (self.step_s or 0.0))

  def sample(self, name: str, value: float) -> None:
    """Feeds one of the moving averages."""
    fresh = average(getattr(self, name), value, self.rules.average_weight)
    setattr(self, name, fresh)

  def settle(self, learner: str, fragment: int) -> None:
    """Books what is over, unless a reply that may cover it is under way."""
    process = self.learners.get(learner)
    if process is not None and self.is_asked(process, fragment):
      return
    account = self.account(learner, fragment)
    fresh = ledger.settle(account)
    if fresh is not account:
      self.put_account(learner, fragment, fresh)

  def publish_to(self, receiver: Receiver, fragment: int, reason: str) -> None:
    """Points one learner to the newest version of a fragment again."""
    self.emit(
      Publish(
        fragment=fragment,
        version=self.fragments[fragment].version,
        receivers=(receiver,),
        exact=self.end is not None and self.end.exact,
        reason=reason,
      )
    )
