"""Any order of events: the machine never raises, and its laws hold."""

import collections
import json
import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ddiloco_jax.protocol import events, machine, members, status
from ddiloco_jax.protocol.events import Counts, Outcome, Version
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.protocol.turn import Turn

NAMES = st.sampled_from(["L0", "L1", "L2", "L3"])
FRAGMENTS = st.integers(0, 2)


class Process:
  """A learner's process as the test believes it to be."""

  def __init__(self, name: str, nonce: str, welcome: events.Welcome):
    self.name, self.nonce = name, nonce
    self.incarnation = welcome.incarnation
    self.step = welcome.t
    self.bases: list[Version | None] = [None] * len(welcome.clocks)
    self.counts = [Counts()] * len(welcome.clocks)
    self.told = [Counts()] * len(welcome.clocks)

  @property
  def where(self) -> dict:
    return {"learner": self.name, "incarnation": self.incarnation}


class AnyOrder(RuleBasedStateMachine):
  """[M9] Random events, honest and not, against laws that the test keeps itself."""

  @initialize(
    quorum=st.sampled_from([1, 1, 2, 3]),
    tau=st.integers(1, 3),
    stale=st.sampled_from(["merge", "reject"]),
    members=st.sampled_from(["live", "reported"]),
    wait=st.booleans(),
    end=st.sampled_from([0, 12]),
    num_present=st.sampled_from([3, 3, 2, 0]),
  )
  def begin(self, quorum, tau, stale, members, wait, end, num_present):
    self.rules = Rules(
      num_fragments=3,
      cycle_steps=4,
      quorum=quorum,
      max_open_rounds=tau,
      stale=stale,
      members=members,
      wait_for_publication=wait,
      num_syncer_steps=end,
      max_staleness=2,
      max_learners=3,
      num_shards=3,
    )
    self.state = machine.initial(self.rules)
    self.now = 0.0
    self.processes: dict[str, Process] = {}
    self.old: list[Process] = []
    self.pulls: list[events.Pull] = []
    self.pulled: set = set()
    self.merges: list[events.Merge] = []
    self.merged_keys: set = set()
    self.freed: set = set()
    self.resolved: dict = {}
    self.versions = [0] * 3
    self.reported = collections.Counter()
    self.nonces = 0
    for name in ("L0", "L1", "L2")[:num_present]:
      self.join(name=name, takeover=False, again=False)
      self.adopt_all(name=name)

  def tell(self, event):
    before = self.state
    self.state, effects = machine.step(self.state, event)
    again, effects_again = machine.step(before, event)
    assert (again, effects_again) == (self.state, effects)
    for effect in effects:
      assert effect.reason, effect
      self._note(effect)
    self._laws()

  def _note(self, effect):
    match effect:
      case events.Welcome():
        name = effect.learner
        if not effect.reconnect:
          if name in self.processes:
            self.old.append(self.processes[name])
          self.processes[name] = Process(name, effect.nonce, effect)
      case events.Pull():
        self.pulls.append(effect)
        key = (effect.learner, effect.incarnation, effect.fragment)
        self.pulled.add((*key, effect.round, effect.attempt))
      case events.Merge():
        self._note_merge(effect)
      case events.Resolved():
        if effect.outcome in (Outcome.ACCEPTED, Outcome.CARRIED):
          assert effect.key not in self.resolved
          assert tuple(effect.key) in self.pulled
          self.resolved[effect.key] = effect.outcome
      case events.Free():
        assert effect.key in self.resolved
        assert effect.key not in self.merged_keys | self.freed
        self.freed.add(effect.key)

  def _note_merge(self, merge):
    r = members.find_round(self.state, merge.fragment)
    assert r is not None
    asked = {tuple(m) for m in r.members}
    for key, weight in merge.inputs:
      assert key in self.resolved
      assert key not in self.merged_keys | self.freed
      assert weight >= 0
      assert math.isfinite(weight)
      if self.resolved[key] is Outcome.ACCEPTED:
        assert (key.learner, key.incarnation) in asked
      self.merged_keys.add(key)
    if not r.flush and not self.rules.wait_for_publication:
      assert len(merge.inputs) >= self.rules.quorum
    assert len({key.learner for key, _ in merge.inputs}) == len(merge.inputs)
    assert any(weight > 0 for _, weight in merge.inputs)
    assert merge.version.n == self.versions[merge.fragment] + 1
    self.merges.append(merge)

  def _laws(self):
    state = self.state
    for name in state.learners:
      for p in range(3):
        totals = status.account_totals(state, name, p)
        lost = [c for _, c in totals.discarded]
        for i in (0, 1):
          assert totals.pending[i] >= 0
          parts = totals.merged[i] + totals.pending[i]
          assert totals.reported[i] == parts + sum(c[i] for c in lost)
        said = self.reported[name, p]
        assert totals.reported.steps >= said, (name, p)
    live = [m for m in state.learners.values() if m.live]
    assert state.num_live == len(live)
    training = [m for m in live if m.training]
    assert state.num_training == len(training)
    times = sorted(m.pacing_s for m in state.learners.values() if m.pacing_s)
    assert list(state.step_times) == times
    assert len(state.rounds) <= self.rules.max_open_rounds
    fragments = [r.fragment for r in state.rounds]
    assert len(set(fragments)) == len(fragments)
    due = [d.fragment for d in state.queue]
    assert len(set(due)) == len(due)
    at = machine.next_timer(state)
    assert at is None or at > state.now
    status.status(state, state.now)

  # --- events ---------------------------------------------------------------

  @rule(name=NAMES, takeover=st.booleans(), again=st.booleans())
  def join(self, name, takeover, again):
    process = self.processes.get(name)
    nonce = process.nonce if process and again else f"n{self.nonces}"
    bases = ()
    if process and again and None not in process.bases:
      bases = tuple(process.bases)
    self.nonces += 1
    self.tell(
      events.Joined(
        time=self.now,
        learner=name,
        nonce=nonce,
        takeover=takeover,
        bases=bases,
      )
    )

  @rule(name=NAMES, tokens=st.sampled_from([0, 5, 100]), dt=st.floats(0, 2))
  def step_and_report(self, name, tokens, dt):
    process = self.processes.get(name)
    if process is None:
      return
    self.now += dt
    process.step += 1
    for p in range(3):
      steps, total = process.counts[p]
      process.counts[p] = Counts(steps + 1, total + tokens)
    self._report(process)

  def _report(self, process, **more):
    if self._is_current(process):
      for p in range(3):
        if process.bases[p] is not None:
          self._raise(process, p)
    boundaries = tuple((p, process.step) for p in range(3))
    self.tell(
      events.Reported(
        time=self.now,
        **process.where,
        step=process.step,
        counts=tuple(process.counts),
        positions=(events.Position(0, process.step),),
        boundaries=boundaries,
        **more,
      )
    )

  def _is_current(self, process):
    known = self.state.learners.get(process.name)
    over = self.state.end is not None and self.state.end.finished
    return (
      known is not None
      and not known.gone
      and known.incarnation == process.incarnation
      and not over
    )

  def _raise(self, process, p):
    more = process.counts[p].steps - process.told[p].steps
    if more > 0:
      self.reported[process.name, p] += more
      process.told[p] = process.counts[p]

  @rule(name=NAMES, sure=st.integers(0, 12))
  def say_exhausted(self, name, sure):
    process = self.processes.get(name)
    if process is not None:
      self._report(process, exhausted=sure == 7, waiting=sure > 7)

  @rule(name=NAMES, p=FRAGMENTS, back=st.integers(0, 1))
  def adopt(self, name, p, back):
    process = self.processes.get(name)
    if process is None:
      return
    newest = self.state.fragments[p].version
    version = Version(newest.epoch, max(0, newest.n - back))
    base = process.bases[p]
    if base is not None and version.n < base.n:
      return
    self.tell(
      events.Applied(
        time=self.now,
        **process.where,
        fragment=p,
        version=version,
        step=process.step,
        counts=process.counts[p],
      )
    )
    process.bases[p] = version
    process.counts[p] = process.told[p] = Counts()

  @rule(name=NAMES)
  def adopt_all(self, name):
    for p in range(3):
      self.adopt(name=name, p=p, back=0)

  @rule(tokens=st.sampled_from([0, 100, 100, 100]), dt=st.floats(0.5, 1.5))
  def everybody_steps(self, tokens, dt):
    for name in tuple(self.processes):
      self.step_and_report(name=name, tokens=tokens, dt=dt)
      dt = 0.0

  @rule()
  def go_on(self):
    for name in tuple(self.processes):
      self.adopt_all(name=name)
    self.everybody_steps(tokens=100, dt=1.0)
    self.answer_honestly(most=3, merge=True)

  @rule(rounds_more=st.integers(0, 2))
  def one_uploads_slowly(self, rounds_more):
    for name in tuple(self.processes):
      self.adopt_all(name=name)
    self.everybody_steps(tokens=100, dt=1.0)
    if not self.pulls:
      return
    slow = self.pulls[-1]
    for num_bytes in (0, 1):
      self.tell(
        events.Pushing(time=self.now, **self._named(slow), num_bytes=num_bytes)
      )
    self.answer_honestly(most=3, merge=True, but=slow)
    for _ in range(rounds_more):
      self.everybody_steps(tokens=100, dt=1.0)
    self.answer(which=self.pulls[::-1].index(slow), norm=1.0, back=0)
    self.finish_merge()

  @rule(most=st.integers(1, 3), merge=st.booleans())
  def answer_honestly(self, most, merge, but=None):
    for pull in self.pulls[-most:]:
      if pull is but:
        continue
      self.answer(which=self.pulls[::-1].index(pull), norm=1.0, back=0)
    if merge:
      self.finish_merge()

  @rule(
    which=st.integers(0, 30),
    norm=st.sampled_from([1.0, 1.0, 1.0, 1e30, math.nan, math.inf]),
    back=st.integers(0, 3),
  )
  def answer(self, which, norm, back):
    if not self.pulls:
      return
    pull = self.pulls[-1 - which % len(self.pulls)]
    process = self.processes[pull.learner]
    base = process.bases[pull.fragment] or Version(1, 0)
    base = base._replace(n=max(0, base.n - back))
    self.tell(
      events.Replied(
        time=self.now,
        learner=pull.learner,
        incarnation=pull.incarnation,
        fragment=pull.fragment,
        round=pull.round,
        attempt=pull.attempt,
        base=base,
        counts=process.counts[pull.fragment],
        norm=norm,
        lr_sum=1.0,
        positions=(events.Position(0, process.step),),
      )
    )

  @rule(name=NAMES, p=FRAGMENTS, number=st.integers(0, 5))
  def answer_unasked(self, name, p, number):
    self.tell(
      events.Replied(
        time=self.now,
        learner=name,
        incarnation=number,
        fragment=p,
        round=number,
        attempt=0,
        base=Version(1, number),
        counts=Counts(),
        norm=1.0,
      )
    )

  @rule(which=st.integers(0, 30), num_bytes=st.integers(0, 9))
  def push(self, which, num_bytes):
    if self.pulls:
      pull = self.pulls[-1 - which % len(self.pulls)]
      self.tell(
        events.Pushing(time=self.now, **self._named(pull), num_bytes=num_bytes)
      )

  @rule(which=st.integers(0, 30))
  def break_push(self, which):
    if self.pulls:
      pull = self.pulls[-1 - which % len(self.pulls)]
      self.tell(
        events.PushBroken(time=self.now, **self._named(pull), reason="reset")
      )

  def _named(self, pull):
    return {
      "learner": pull.learner,
      "incarnation": pull.incarnation,
      "fragment": pull.fragment,
      "round": pull.round,
      "attempt": pull.attempt,
    }

  @rule()
  def finish_merge(self):
    if not self.merges:
      return
    merge = self.merges.pop(0)
    # Told before: a carried reply may open and close the next round at once.
    self.versions[merge.fragment] = merge.version.n
    self.tell(
      events.Merged(
        time=self.now,
        fragment=merge.fragment,
        round=merge.round,
        version=merge.version,
      )
    )
    assert self.state.fragments[merge.fragment].version == merge.version

  @rule(p=FRAGMENTS, n=st.integers(0, 3))
  def merge_nobody_asked_for(self, p, n):
    self.tell(
      events.Merged(time=self.now, fragment=p, round=99, version=Version(1, n))
    )

  @rule(name=NAMES, kind=st.sampled_from(["heard", "ended", "left"]))
  def say_little(self, name, kind):
    process = self.processes.get(name)
    if process is None:
      return
    if kind == "left":
      event = events.Left(time=self.now, **process.where, reason="test")
    elif kind == "ended":
      event = events.Disconnected(time=self.now, **process.where)
    else:
      event = events.Heard(time=self.now, **process.where)
    self.tell(event)

  @rule(dt=st.sampled_from([0.01, 0.1, 1.0, 1.0, 6.0, 20.0]))
  def wait(self, dt):
    self.now += dt
    self.tell(events.Ticked(time=self.now))

  @rule()
  def wait_for_timer(self):
    at = machine.next_timer(self.state)
    if at is not None:
      self.now = max(self.now, at)
      self.tell(events.Ticked(time=self.now))

  @rule(sure=st.integers(0, 30))
  def stop(self, sure):
    if sure == 17:
      self.tell(events.StopRequested(time=self.now, reason="test"))

  @rule()
  def save_and_load(self):
    text = json.dumps(machine.save(self.state), allow_nan=False)
    loaded = machine.load(self.rules, json.loads(text))
    assert loaded == self.state
    assert machine.digest(loaded) == machine.digest(self.state)
    restored = machine.restore(self.rules, json.loads(text))
    assert restored.epoch == self.state.epoch + 1
    assert not restored.rounds
    for name in restored.learners:
      for p in range(3):
        before = status.account_totals(self.state, name, p)
        after = status.account_totals(restored, name, p)
        assert before.reported == after.reported
        assert before.merged == after.merged

  def teardown(self):
    if not hasattr(self, "state"):
      return
    while self.merges:
      self.finish_merge()
    for _ in range(300):
      at = machine.next_timer(self.state)
      if at is None:
        break
      self.now = max(self.now, at)
      self.tell(events.Ticked(time=self.now))
      while self.merges:
        self.finish_merge()
    # Nobody has spoken for long: every round has ended, in one way or another.
    assert not self.state.rounds
    assert machine.next_timer(self.state) is None
    if self.state.end is not None:
      assert self.state.end.finished
      for name in self.state.learners:
        for p in range(3):
          totals = status.account_totals(self.state, name, p)
          assert totals.pending == (0, 0)


AnyOrder.TestCase.settings = settings(
  max_examples=80, stateful_step_count=50, deadline=None
)
test_laws_hold_in_any_order = AnyOrder.TestCase


def test_turn_has_every_field_of_the_state():
  fields = set(machine.State._fields)

  assert fields == set(Turn.__annotations__)
