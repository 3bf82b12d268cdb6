"""Learners in virtual time around the machine: a heap, no clock, no threads.

Every learner trains at its own pace, answers pulls from the copy of its last
boundary, and adopts what was published at its next one.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Sequence

from ddiloco_jax.protocol import check, events, machine
from ddiloco_jax.protocol.events import Counts, Position, Version
from ddiloco_jax.protocol.rules import Rules

TOKENS = 100


@dataclasses.dataclass
class Learner:
  """One learner; times in seconds."""

  name: str
  step_s: float = 1.0
  up_s: float = 0.01
  down_s: float = 0.01
  push_s: float = 0.0
  num_batches: int = 10**9
  start_at: float = 0.0
  at_boundary: bool = False  # Answers pulls at the next boundary only.
  lr: float = 1.0

  def __post_init__(self):
    self.nonce = f"{self.name}-0"
    self.incarnation = 0
    self.alive = True
    self.stopped = False
    self.step = 0
    self.counts: list[Counts] = []
    self.bases: list[Version] = []
    self.copies: dict[int, tuple[Version, Counts]] = {}
    self.known: dict[int, int] = {}
    self.fresh: dict[int, Version] = {}
    self.exact: set[int] = set()
    self.deferred: list[events.Pull] = []
    self.position = Position(0, 0)
    self.boundaries: dict[int, int] = {}
    self.waiting = False
    self.finished_step = False


class Run:
  """Drives the machine until the run has finished or time is up."""

  def __init__(
    self,
    rules: Rules,
    learners: Sequence[Learner],
    *,
    merge_s: float = 0.01,
  ):
    self.rules = rules
    self.state = machine.initial(rules)
    self.learners = {learner.name: learner for learner in learners}
    self.merge_s = merge_s
    self.is_down = False
    self.now = 0.0
    self.events: list[events.Event] = []
    self.effects: list[events.Effect] = []
    self.times: list[float] = []
    self.finished: events.Finished | None = None
    self._heap: list = []
    self._order = itertools.count()
    self._tick_at: float | None = None
    for learner in learners:
      self.at(learner.start_at, self._join, learner)

  def at(self, time: float, do: Callable, *arguments) -> None:
    heapq.heappush(self._heap, (time, next(self._order), do, arguments))

  def run(self, until: float = 1e9, stop=lambda run: False) -> "Run":
    while self._heap and self.finished is None and not stop(self):
      if self._heap[0][0] > until:
        self.now = until
        break
      self.now, _, do, arguments = heapq.heappop(self._heap)
      do(*arguments)
    return self

  def of(self, kind: type) -> list:
    return [e for e in self.effects if isinstance(e, kind)]

  def tell(self, event: events.Event) -> None:
    event = dataclasses.replace(event, time=self.now)
    if not isinstance(event, events.Pushing):
      check.check(self.state, event)  # Honest learners are never refused.
    self.events.append(event)
    self.state, effects = machine.step(self.state, event)
    self.effects += effects
    self.times += [self.now] * len(effects)
    for effect in effects:
      self._obey(effect)
    at = machine.next_timer(self.state)
    if at is not None and (self._tick_at is None or at < self._tick_at):
      self._tick_at = at
      self.at(at, self._tick, at)

  def kill(self, name: str, *, silent: bool = False) -> None:
    learner = self.learners[name]
    learner.alive = False
    if not silent:
      self.tell(self._stamp(learner, events.Disconnected()))

  def restart(self, name: str, **changes) -> None:
    old = self.learners[name]
    learner = dataclasses.replace(old, start_at=self.now, **changes)
    learner.nonce = f"{name}-{int(old.nonce.rsplit('-', 1)[1]) + 1}"
    self.learners[name] = learner
    self._join(learner, takeover=True)

  def kill_syncer(self, saved: machine.State, downtime_s: float) -> None:
    """It vanishes, and is restored later from what it had saved."""
    kept = {self._stepped, self._beat}
    self._heap = [entry for entry in self._heap if entry[2] in kept]
    heapq.heapify(self._heap)
    self.is_down, self._tick_at = True, None
    self.at(self.now + downtime_s, self._restore, machine.save(saved))

  def _restore(self, saved: dict) -> None:
    self.is_down = False
    self.state = machine.restore(self.rules, saved)
    for learner in self.learners.values():
      learner.deferred = []
      self.tell(
        events.Joined(
          learner=learner.name, nonce=learner.nonce, bases=tuple(learner.bases)
        )
      )

  def _tick(self, at: float) -> None:
    if self._tick_at == at:
      self._tick_at = None
    self.tell(events.Ticked())

  def _stamp(self, learner: Learner, event):
    return dataclasses.replace(
      event, learner=learner.name, incarnation=learner.incarnation
    )

  def _send(self, learner: Learner, event, delay: float = 0.0) -> None:
    if self.is_down:
      return
    event = self._stamp(learner, event)
    self.at(self.now + learner.up_s + delay, self.tell, event)

  def _join(self, learner: Learner, takeover: bool = False) -> None:
    self.tell(
      events.Joined(
        learner=learner.name, nonce=learner.nonce, takeover=takeover
      )
    )

  def _obey(self, effect: events.Effect) -> None:
    match effect:
      case events.Welcome():
        learner = self.learners[effect.learner]
        self.at(self.now + learner.down_s, self._begin, learner, effect)
      case events.Pull():
        learner = self.learners[effect.learner]
        self.at(self.now + learner.down_s, self._pulled, learner, effect)
      case events.Publish():
        for receiver in effect.receivers:
          learner = self.learners[receiver.learner]
          self.at(self.now + learner.down_s, self._fetched, learner, effect)
      case events.Merge():
        merged = events.Merged(
          fragment=effect.fragment, round=effect.round, version=effect.version
        )
        self.at(self.now + self.merge_s, self.tell, merged)
      case events.Ending():
        for learner in self.learners.values():
          learner.stopped = True
      case events.Finished():
        self.finished = effect

  def _begin(self, learner: Learner, welcome: events.Welcome) -> None:
    learner.incarnation = welcome.incarnation
    if welcome.reconnect:
      for p, clock in enumerate(welcome.clocks):
        base = learner.bases[p]
        rolled_back = base.epoch < self.state.epoch and base.n > clock.n0
        learner.known[p] = 0 if rolled_back else base.n
        if clock.version.n > base.n:
          learner.fresh[p] = clock.version
      return
    learner.position = welcome.positions[0]
    cumulative = self.rules.wait_for_publication or self.rules.max_ahead
    learner.step = welcome.t if cumulative else 0
    learner.bases = [clock.version for clock in welcome.clocks]
    learner.known = {p: base.n for p, base in enumerate(learner.bases)}
    learner.counts = [Counts()] * len(learner.bases)
    for p, base in enumerate(learner.bases):
      self._send(
        learner, events.Applied(fragment=p, version=base, step=learner.step)
      )
    self.at(self.now + learner.step_s, self._stepped, learner)
    self._beat(learner, learner.incarnation)

  def _beat(self, learner: Learner, incarnation: int) -> None:
    """Who takes no steps still says that it is there."""
    if not learner.alive or learner.incarnation != incarnation:
      return
    if learner.waiting or learner.stopped:
      self._send(learner, events.Heard())
    self.at(self.now + self.rules.lease_s / 3, self._beat, learner, incarnation)

  def _stepped(self, learner: Learner) -> None:
    if not learner.alive or learner.stopped:
      return
    learner.step += 1
    learner.counts = [Counts(c[0] + 1, c[1] + TOKENS) for c in learner.counts]
    learner.position = Position(
      learner.position.shard, learner.position.batch + 1
    )
    learner.copies = dict(enumerate(zip(learner.bases, learner.counts)))
    if self.rules.wait_for_publication:
      self._note_boundaries(learner)
    used_up = learner.position.batch >= learner.num_batches
    self._report(learner, exhausted=used_up)
    for pull in learner.deferred:
      self._answer(learner, pull)
    learner.deferred = []
    if used_up:
      learner.waiting = True
      return
    self._go_on(learner)

  def _note_boundaries(self, learner: Learner) -> None:
    num, cycle = self.rules.num_fragments, self.rules.cycle_steps
    for p in range(num):
      if learner.step % cycle == p * cycle // num:
        learner.boundaries[p] = learner.step

  def _report(self, learner: Learner, exhausted: bool = False) -> None:
    delay = self.rules.adoption_delay_steps
    waits = any(
      at + delay <= learner.step for at in learner.boundaries.values()
    )
    self._send(
      learner,
      events.Reported(
        step=learner.step,
        counts=tuple(learner.counts),
        positions=(learner.position,),
        boundaries=tuple(learner.boundaries.items()),
        waiting=waits,
        exhausted=exhausted,
      ),
    )
    learner.waiting = waits

  def _go_on(self, learner: Learner) -> None:
    if learner.waiting:
      return
    self._adopt(learner)
    self.at(self.now + learner.step_s, self._stepped, learner)

  def _adopt(self, learner: Learner) -> None:
    for p, version in learner.fresh.items():
      if version.n < learner.known[p]:
        continue
      self._send(
        learner,
        events.Applied(
          fragment=p,
          version=version,
          step=learner.step,
          counts=learner.counts[p],
          exact=p in learner.exact,
        ),
      )
      learner.bases[p], learner.known[p] = version, version.n
      learner.counts[p] = Counts()
      learner.copies.pop(p, None)
    learner.fresh = {}

  def _fetched(self, learner: Learner, effect: events.Publish) -> None:
    if not learner.alive or not learner.incarnation:
      return
    learner.fresh[effect.fragment] = effect.version
    if effect.exact:
      learner.exact.add(effect.fragment)
    if learner.stopped:
      self._adopt(learner)
      return
    if effect.fragment in learner.boundaries:
      del learner.boundaries[effect.fragment]
      delay = self.rules.adoption_delay_steps
      if learner.waiting and not any(
        at + delay <= learner.step for at in learner.boundaries.values()
      ):
        learner.waiting = False
        self._go_on(learner)

  def _pulled(self, learner: Learner, pull: events.Pull) -> None:
    if not learner.alive or pull.incarnation != learner.incarnation:
      return
    waits = learner.stopped or learner.waiting
    if pull.fragment in learner.copies and (waits or not learner.at_boundary):
      self._answer(learner, pull)
    else:
      learner.deferred.append(pull)

  def _answer(self, learner: Learner, pull: events.Pull) -> None:
    base, counts = learner.copies[pull.fragment]
    where = dict(fragment=pull.fragment, round=pull.round, attempt=pull.attempt)
    if learner.push_s:
      self._send(learner, events.Pushing(**where, num_bytes=0))
      for second in range(1, int(learner.push_s) + 1):
        moved = events.Pushing(**where, num_bytes=second)
        self._send(learner, moved, float(second))
    self._send(
      learner,
      events.Replied(
        **where,
        base=base,
        counts=counts,
        norm=float(counts.steps),
        lr_sum=learner.lr * counts.steps,
        positions=(learner.position,),
      ),
      learner.push_s,
    )
