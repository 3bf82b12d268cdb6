"""[D1, N10] Any order of what concerns data: no example is included twice."""

import collections
import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ddiloco_jax.learner.shards import Shards
from ddiloco_jax.protocol import events, machine
from ddiloco_jax.protocol.events import Counts, Version
from ddiloco_jax.protocol.rules import Rules

NAMES = ("L0", "L1", "L2")
WHO = st.sampled_from(NAMES)
NUM = 2  # Fragments.


class Process:
  """A learner as the loop and its link are, its messages on the way."""

  def __init__(self, nonce):
    self.nonce = nonce
    self.incarnation = 0
    self.step = 0
    self.shards = Shards(lambda shard: lambda batch: {"id": (shard, batch)})
    self.bases: list[Version] = []
    self.read: list[list] = [[] for _ in range(NUM)]  # Since the adoption.
    self.up: list = []  # Control stream, in order.
    self.down: list = []
    self.copies: dict = {}
    self.pushes: list = []


class DataInAnyOrder(RuleBasedStateMachine):
  @initialize(per_learner=st.integers(1, 2), lease=st.sampled_from([0.0, 8.0]))
  def begin(self, per_learner, lease):
    self.rules = Rules(
      num_fragments=NUM,
      cycle_steps=2,
      lease_s=3.0,
      shard_lease_s=lease,
      shards_per_learner=per_learner,
      max_learners=3,
      num_shards=3 * per_learner,
    )
    self.state = machine.initial(self.rules)
    self.now = 0.0
    self.nonces = 0
    self.processes: dict[str, Process] = {}
    self.readers = collections.defaultdict(list)  # Id -> incarnations.
    self.replies: dict = {}
    self.included = [collections.Counter() for _ in range(NUM)]
    self.merges: list[events.Merge] = []
    for name in NAMES[:2]:
      self.start(name)
    self.everybody_goes_on(rounds=2)

  def tell(self, event):
    before = self.state
    event = dataclasses.replace(event, time=self.now)
    self.state, effects = machine.step(self.state, event)
    for effect in effects:
      self._note(effect)
    for shard, batch in before.accepted.items():
      assert self.state.accepted[shard] >= batch
    reads = [s for m in self.state.learners.values() for s in m.reads]
    assert len(reads) == len(set(reads)), "a shard has two readers"
    owned = [s for m in self.state.learners.values() for s in m.shards]
    assert len(owned) == len(set(owned)), "a shard has two owners"

  def _note(self, effect):
    match effect:
      case events.Welcome():
        process = self.processes[effect.learner]
        process.up, process.down = [], [effect]
      case events.Pull() | events.Shards():
        process = self.processes.get(effect.learner)
        if process is not None:
          process.down.append(effect)
      case events.Publish():
        for receiver in effect.receivers:
          process = self.processes.get(receiver.learner)
          if process is not None:
            process.down.append((effect.fragment, effect.version))
      case events.Merge():
        self.merges.append(effect)

  # --- what processes do ------------------------------------------------------

  @rule(name=WHO)
  def start(self, name):
    """Another process of an id; the one before is gone without a word."""
    self.nonces += 1
    self.processes[name] = Process(f"n{self.nonces}")
    self.join(name)

  @rule(name=WHO)
  def join(self, name):
    process = self.processes.get(name)
    if process is not None:
      self.tell(
        events.Joined(
          learner=name,
          nonce=process.nonce,
          takeover=True,
          bases=tuple(process.bases),
          takes_shards=True,
        )
      )

  @rule(name=WHO, most=st.integers(1, 6))
  def hear(self, name, most):
    """Notices arrive; the loop looks at them at a boundary."""
    process = self.processes.get(name)
    if process is None:
      return
    for _ in range(min(most, len(process.down))):
      notice = process.down.pop(0)
      match notice:
        case events.Welcome():
          self._welcomed(process, name, notice)
        case events.Shards(incarnation=incarnation, positions=positions):
          if incarnation == process.incarnation:
            process.shards.change(positions)
        case events.Pull():
          self._answer(process, notice)
        case (p, version):
          if process.bases and version.n > process.bases[p].n:
            self._adopt(process, name, p, version)

  def _welcomed(self, process, name, welcome):
    if not process.bases:
      process.bases = [clock.version for clock in welcome.clocks]
    if welcome.reconnect:
      return
    process.incarnation = welcome.incarnation
    process.shards.begin(welcome.positions)
    process.read = [[] for _ in range(NUM)]
    process.copies, process.pushes = {}, []
    for p, base in enumerate(process.bases):
      where = {"learner": name, "incarnation": process.incarnation}
      process.up.append(
        events.Applied(**where, fragment=p, version=base, step=process.step)
      )

  def _adopt(self, process, name, p, version):
    counts = Counts(len(process.read[p]), len(process.read[p]))
    process.bases[p], process.read[p] = version, []
    process.copies.pop(p, None)
    process.up.append(
      events.Applied(
        learner=name,
        incarnation=process.incarnation,
        fragment=p,
        version=version,
        step=process.step,
        counts=counts,
      )
    )

  def _answer(self, process, pull):
    copy = process.copies.get(pull.fragment)
    if copy is None or pull.incarnation != process.incarnation:
      return
    read, base, positions = copy
    reply = events.Replied(
      learner=pull.learner,
      incarnation=pull.incarnation,
      fragment=pull.fragment,
      round=pull.round,
      attempt=pull.attempt,
      base=base,
      counts=Counts(len(read), len(read)),
      norm=1.0,
      lr_sum=1.0,
      positions=positions,
    )
    process.pushes.append((reply, read))

  @rule(name=WHO, steps=st.integers(1, 4))
  def step(self, name, steps):
    process = self.processes.get(name)
    if process is None or not process.incarnation:
      return
    for _ in range(steps):
      batch = process.shards.batch()
      if batch is None:
        return
      # A process that is over, and has not heard of it, may read on.
      if self.state.learners[name].incarnation == process.incarnation and (
        not self.state.learners[name].gone
      ):
        others = {
          m.incarnation
          for m in self.state.learners.values()
          if not m.gone and m.learner != name
        }
        assert not others.intersection(self.readers[batch["id"]])
      self.readers[batch["id"]].append(process.incarnation)
      process.step += 1
      for read in process.read:
        read.append(batch["id"])
      process.shards.advance()
      positions = process.shards.positions()
      process.copies = {
        p: (tuple(process.read[p]), process.bases[p], positions)
        for p in range(NUM)
      }
      process.up.append(
        events.Reported(
          learner=name,
          incarnation=process.incarnation,
          step=process.step,
          counts=tuple(Counts(len(r), len(r)) for r in process.read),
          positions=positions,
          returned=process.shards.returned(),
        )
      )

  @rule(name=WHO, most=st.integers(1, 8))
  def say(self, name, most):
    process = self.processes.get(name)
    for _ in range(most):
      if process is not None and process.up:
        self.tell(process.up.pop(0))

  @rule(name=WHO, which=st.integers(0, 5), twice=st.booleans())
  def push(self, name, which, twice):
    process = self.processes.get(name)
    if process is None or not process.pushes:
      return
    index = which % len(process.pushes)
    reply, read = process.pushes[index]
    if not twice:
      del process.pushes[index]
    key = events.ReplyKey(
      name, reply.incarnation, reply.fragment, reply.round, reply.attempt
    )
    self.replies.setdefault(key, read)
    self.tell(reply)

  # --- what the syncer and time do ----------------------------------------------

  @rule()
  def finish_merge(self):
    if self.merges:
      merge = self.merges.pop(0)
      for key, _ in merge.inputs:
        self.included[key.fragment].update(self.replies[key])
      for seen in self.included:
        assert not seen or max(seen.values()) == 1, "an id is included twice"
      self.tell(
        events.Merged(
          fragment=merge.fragment, round=merge.round, version=merge.version
        )
      )

  @rule(dt=st.sampled_from([0.5, 1.0, 4.0, 9.0, 13.0]))
  def wait(self, dt):
    self.now += dt
    self.tell(events.Ticked())

  @rule(name=WHO)
  def leave(self, name):
    process = self.processes.pop(name, None)
    if process is not None and process.incarnation:
      self.tell(
        events.Left(learner=name, incarnation=process.incarnation, reason="x")
      )

  @rule(rounds=st.integers(1, 4), away=st.sampled_from(["", *NAMES]))
  def everybody_goes_on(self, rounds, away=""):
    for _ in range(rounds):
      self.now += 1.0
      for name in NAMES:
        if name != away:
          self.hear(name, most=6)
          self.step(name, steps=1)
          self.say(name, most=8)
      for name in NAMES:
        if name != away:
          self.hear(name, most=6)
          self.push(name, which=0, twice=False)
      self.now += 0.5
      self.tell(events.Ticked())
      self.finish_merge()

  @rule(name=WHO, rounds=st.integers(4, 14))
  def one_is_away(self, name, rounds):
    self.everybody_goes_on(rounds=rounds, away=name)

  @rule()
  def restart_the_syncer(self):
    """Durable: whatever it decided is kept; streams and rounds are not."""
    saved = machine.save(self.state)
    self.state = machine.restore(self.rules, saved)
    self.merges = []
    for process in self.processes.values():
      process.up, process.down, process.pushes = [], [], []
    for name in self.processes:
      self.join(name)

  def teardown(self):
    if not hasattr(self, "state"):
      return
    for shard, batch in self.state.accepted.items():
      for position in range(batch):
        assert self.readers[shard, position], "a hole that nobody read"


DataInAnyOrder.TestCase.settings = settings(
  max_examples=25, stateful_step_count=30, deadline=None
)
TestDataInAnyOrder = DataInAnyOrder.TestCase
