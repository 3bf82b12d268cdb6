"""The machine among learners, links and crashes: what each choice does.

The world plays the syncer's service, its merge worker and its disk; every event
that it feeds and every effect that it routes passes the laws.
(arXiv 2604.21428, Sec. 3 and App. E.)
"""

import dataclasses
import json
from collections.abc import Callable

from ddiloco_jax.protocol import check, events, machine, waiting
from ddiloco_jax.protocol.rules import Rules

from . import evil
from .laws import Broken, Laws
from .process import Process, Push
from .schedule import NUM_CHOICES, NUM_EVENTS, Choice, Schedule, Settings

_KEPT = (events.Outcome.ACCEPTED, events.Outcome.CARRIED)
_LINGER = 6  # Choices that a finished run is still talked to.
_PURE_EVERY = 20  # Events between two steps that are taken twice.
_CALM_ROUNDS = 200  # A second each.
_QUIET_TICKS = 400
_WAITS_S = (0.01, 0.1, 0.3, 1.0, 1.0, 2.0, 6.0, 11.0)
_SILENCES_S = (6.0, 16.0, 25.0, 65.0, 700.0)


Record = Callable[[events.Event, tuple[events.Effect, ...]], None]


class World:
  """One schedule under way."""

  def __init__(
    self,
    settings: Settings,
    laws: Laws,
    record: Record | None = None,
    told: Callable[[str], None] | None = None,
  ):
    self.settings = settings
    self.rules: Rules = settings.rules
    self.laws, self.record, self.told = laws, record, told
    self.state = machine.initial(self.rules)
    self.now = 0.0
    self.num_events = 0
    self.slots: list[Process] = []
    self.processes: list[Process] = []  # All that ever were.
    self.ghosts: list[Process] = []
    self.streams: dict[tuple[str, int], Process] = {}
    self.merges: list[events.Merge] = []
    self.captures: list[events.Captured] = []  # To come, in this order.
    self.committed = self.on_disk = self.state
    self.has_forgotten = False  # What it was told, beyond its last commit.
    self.lingered = 0
    laws.begin(self.state)
    for slot in range(settings.num_learners):
      self.slots.append(self._new_process(slot))

  def run(self, choices: tuple[Choice, ...]) -> None:
    """Makes the choices, until enough events were consumed."""
    for choice in choices:
      if self.num_events >= NUM_EVENTS:
        return
      self._choose(choice)

  def fill(self) -> None:
    """Ordinary choices, where those drawn led to too few events."""
    while self.num_events < NUM_EVENTS:
      self._choose(Choice("wait", 4 + 256))
      self._choose(Choice("everybody", 0))

  def _choose(self, choice: Choice) -> None:
    getattr(self, choice.name)(choice.number)
    if self.is_finished:
      self.lingered += 1
      if self.lingered > _LINGER:
        self.extend()

  @property
  def is_finished(self) -> bool:
    return self.state.end is not None and self.state.end.finished

  # --- events in, effects out ---------------------------------------------------

  def tell(
    self, event: events.Event, joining: Process | None = None
  ) -> tuple[events.Effect, ...]:
    """Feeds the machine, and puts what it decided on its ways."""
    event = dataclasses.replace(event, time=self.now)
    before = self.state
    try:
      self.state, effects = machine.step(before, event)
    except Exception as error:
      raise Broken("no event raises", f"{event}: {error!r}") from error
    if self.record:
      self.record(event, effects)
    self.num_events += 1
    if self.num_events % _PURE_EVERY == 0:
      again = machine.step(before, event)
      if again != (self.state, effects):
        raise Broken("a step is pure", f"{event}")
    self.laws.check(before, event, self.state, effects)
    if isinstance(event, events.Merged):
      self.committed = self.state
    for effect in effects:
      self._route(effect, joining)
    return effects

  def say(self, event: events.Event, *, honest: bool) -> bool:
    """Feeds what passes the service's check; honest words always do."""
    try:
      check.check(self.state, event)
    except ValueError as error:
      if honest:
        raise Broken("honest words pass", f"{event}: {error}") from error
      self.laws.num_unfit += 1
      if isinstance(event, events.LearnerEvent):
        self.tell(
          events.Misspoke(
            learner=event.learner,
            incarnation=event.incarnation,
            reason=str(error),
          )
        )
      return False
    self.tell(event)
    return True

  def lie(self, event: events.Event) -> None:
    """Feeds a malicious word; whose it passes for is not trusted from here."""
    if isinstance(event, events.LearnerEvent):
      self.laws.distrust(event, self.state)
    self.say(event, honest=False)

  def pretend(self, process: Process, hello: events.Joined) -> None:
    """A process that has another's nonce, or bases that cannot be, joins."""
    try:
      check.check(self.state, hello)
    except ValueError:
      self.laws.num_unfit += 1
      return
    for effect in self.tell(hello, imposter := self._copy_of(process, hello)):
      if isinstance(effect, events.Welcome):
        self.ghosts = [*self.ghosts[-3:], process]
        self.slots[self.slots.index(process)] = imposter
        self._welcome(imposter, hello, effect)
        event = events.Heard(
          learner=hello.learner, incarnation=effect.incarnation
        )
        self.laws.distrust(event, self.state)

  def _copy_of(self, process: Process, hello: events.Joined) -> Process:
    slot = self.slots.index(process)
    imposter = self._new_process(slot)
    imposter.nonce = hello.nonce
    return imposter

  def _route(self, effect: events.Effect, joining: Process | None) -> None:
    match effect:
      case events.Welcome():
        assert joining
        self.streams[effect.learner, effect.incarnation] = joining
      case events.Fence():
        self.streams.pop((effect.learner, effect.incarnation), None)
      case events.Pull() | events.Shards():
        self._notify(effect.learner, effect.incarnation, effect)
      case events.Marker(snapshot=number):
        for name, incarnation in effect.members:
          self._notify(name, incarnation, effect)
        self.captures.append(events.Captured(snapshot=number))
      case events.Publish() | events.GiveUp():
        for receiver in effect.receivers:
          self._notify(receiver.learner, receiver.incarnation, effect)
      case events.Ending() | events.Finished():
        for process in self.streams.values():
          process.down.append(effect)
        if isinstance(effect, events.Finished):
          self.streams.clear()  # The service ends them.
      case events.Merge():
        self.merges.append(effect)

  def _notify(self, name: str, incarnation: int, effect: events.Effect) -> None:
    process = self.streams.get((name, incarnation))
    if process:
      process.down.append(effect)

  # --- how a schedule ends ---------------------------------------------------------

  def conclude(self) -> None:
    """Faults are over: what must come comes, and the books are right."""
    if self.settings.ending == "calm":
      self._calm()
    else:
      if self.settings.ending == "stop":
        self.stop(1)
      self._fall_silent()
    self.laws.sampled(self.state)
    self._check_booked()
    trained: dict[str, list[int]] = {}
    for process in self.processes:
      row = trained.setdefault(process.name, [0] * self.rules.num_fragments)
      row[:] = map(sum, zip(row, process.trained))
    self.laws.invented(self.state, trained)
    if self.is_finished:
      self.laws.finished(self.state)
    if self.laws.reached:
      self.laws.reached.note_state(self.state)

  def _check_booked(self) -> None:
    """Whoever said all that it did, as one process, finds it in the books."""
    if self.has_forgotten:
      return
    for process in self.slots:
      name, end = process.name, self.state.end
      learner = self.state.learners.get(name)
      others = [
        m for m in self.processes if m.name == name and m is not process
      ]
      if others or process.admissions != 1 or process.up:
        continue
      if not (learner and process.connected and self._has_session(process)):
        continue
      if learner.gone:
        continue
      if end and len(learner.exact) < len(process.trained):
        continue
      self.laws.booked(self.state, name, process.trained)

  def _calm(self) -> None:
    """Learners are honest, links whole: a merge comes, or the run ends."""
    if self.is_finished:
      return
    merged = self._num_merged()
    self.now += self.rules.lease_s  # Whom nobody speaks for is not live.
    self.tell(events.Ticked())
    self.ghosts.clear()
    for process in self.slots:
      process.stalled = False
    for _ in range(_CALM_ROUNDS):
      self.now += 1.0
      for slot in range(len(self.slots)):
        if not self.is_finished:
          self.flow(slot)
          self._exchange(self.slots[slot])
      self._pass_time()
      if self.is_finished or self._num_merged() > merged:
        return
    if self._is_possible():
      raise Broken("progress", waiting.wait(self.state, self.now).sentence)

  def _num_merged(self) -> int:
    return sum(f.version.n for f in self.state.fragments)

  def _is_possible(self) -> bool:
    """Whether enough learners are there, that count tokens and are alike."""
    able = [
      m
      for m in self.state.learners.values()
      if m.live and m.training and not m.exhausted
    ]
    alike = len(set(self.settings.loudness)) == 1 and all(self.settings.tokens)
    # t waits a step's time, which a silence may have made long.
    soon = (self.state.step_s or 0.0) < _CALM_ROUNDS / 40
    return len(able) >= self.rules.quorum and alike and soon

  def _pass_time(self) -> None:
    """Merges and copies are done and timers fire, up to now."""
    while self.merges:
      self.merge(0)
    while self.captures:
      self.capture(0)
    while (at := machine.next_timer(self.state)) is not None and at <= self.now:
      self.tell(events.Ticked())

  def _fall_silent(self) -> None:
    for _ in range(_QUIET_TICKS):
      while self.merges:
        self.merge(0)
      at = machine.next_timer(self.state)
      if at is None:
        break
      self.now = max(self.now, at)
      self.tell(events.Ticked())
    state = self.state
    is_over = state.end is None or state.end.finished
    if machine.next_timer(state) is not None or state.rounds or not is_over:
      raise Broken("quiet", f"{machine.next_timer(state)}: {state.rounds}")

  # --- ordinary choices -----------------------------------------------------------

  def _of(self, number: int) -> tuple[int, Process, int]:
    slot = number % len(self.slots)
    return slot, self.slots[slot], number // len(self.slots)

  def _new_process(self, slot: int) -> Process:
    nonce = f"n{len(self.processes)}"
    process = Process(
      slot,
      nonce,
      self.rules,
      max_replies=self.settings.max_replies,
      takes_shards=self.settings.own[slot],
    )
    self.processes.append(process)
    return process

  def flow(self, number: int) -> None:
    """A step of one learner, with everything that waits on its link."""
    slot, process, more = self._of(number)
    if process.is_over:
      self.slots[slot] = process = self._new_process(slot)
    self.now += 0.05 + (more & 7) / 20
    if not process.connected:
      self._join(process, takeover=bool(more & 8))
      if process.is_over:
        return
    self._exchange(process)
    process.boundary(self.settings.tokens[slot], more >> 4)
    self._exchange(process)
    if more >> 9 & 3:
      self.merge(more)
    if more >> 9 & 15 == 15:
      self.capture(more)

  def _exchange(self, process: Process) -> None:
    while process.down and process.connected:
      self._down(process)
    while process.up:
      self._up(process)
    for p in tuple(process.wanted):
      self._fetch(process, p)
    while not process.stalled and (
      process.pushes
      or process.begin_push(
        self.settings.loudness[self.slots.index(process)], per_lr=True
      )
    ):
      self._finish(process, process.pushes[0])

  def everybody(self, number: int) -> None:
    num = len(self.slots)
    for slot in range(num):
      self.flow(number // num * num + slot)

  def train(self, number: int) -> None:
    slot, process, more = self._of(number)
    self.now += 0.05 + (more & 7) / 20
    if more >> 3 & 7 == 7:
      process.take()  # It adopts what it took at its next boundary.
      return
    process.boundary(self.settings.tokens[slot], more >> 6)

  def up(self, number: int) -> None:
    _, process, more = self._of(number)
    for _ in range(1 + more % 3):
      if process.up:
        self._up(process)

  def _up(self, process: Process) -> None:
    event = process.up.popleft()
    who = process.name, process.incarnation
    if self.streams.get(who) is not process:
      process.lose_stream()
    elif not self.say(event, honest=self.laws.is_trusted(process.name)):
      self._cut(process, is_seen=True)
      process.is_over = True  # After what was said in its name.

  def deliver_ghost(self, ghost: Process) -> bool:
    """The next word on the stream of a process that was cut off."""
    if ghost.up:
      self._up(ghost)
      return True
    return False

  def down(self, number: int) -> None:
    _, process, more = self._of(number)
    for _ in range(1 + more % 3):
      self._down(process)

  def _down(self, process: Process) -> None:
    """The next notice arrives; each carries a stamp, as a heartbeat does."""
    if process.connected:
      process.t = self.state.t
      if process.down:
        process.hear(process.down.popleft())

  def fetch(self, number: int) -> None:
    _, process, more = self._of(number)
    if process.wanted:
      wanted = tuple(process.wanted)
      self._fetch(process, wanted[more % len(wanted)])

  def _fetch(self, process: Process, p: int) -> None:
    """The newest version arrives, if its session is one of this syncer's."""
    if self._has_session(process):
      newest = self.state.fragments[p].version
      process.fetched(p, newest, exact=process.wanted[p])

  def _has_session(self, process: Process) -> bool:
    known = self.state.learners.get(process.name)
    return (
      process.epoch == self.state.epoch
      and known is not None
      and known.incarnation == process.incarnation
    )

  def push(self, number: int) -> None:
    """An answer begins, moves, breaks, arrives, or arrives unheard."""
    slot, process, more = self._of(number)
    pushes = process.pushes
    if not pushes or more & 1:
      loudness = self.settings.loudness[slot]
      push = process.begin_push(loudness, per_lr=bool(more & 14))
      if push and self._has_session(process):
        self.tell(_about(events.Pushing, push.reply, num_bytes=0))
      return
    if process.stalled and more >> 9 & 7:
      return
    process.stalled = False
    push, act = pushes[(more >> 1) % len(pushes)], (more >> 4) % 8
    if not self._has_session(process):
      pushes.remove(push)
    elif act < 2:
      push.num_bytes += more >> 7 & 3
      self.tell(_about(events.Pushing, push.reply, num_bytes=push.num_bytes))
    elif act < 3:
      push.num_bytes = 0
      self.tell(_about(events.PushBroken, push.reply, reason="reset"))
    else:
      self._finish(process, push, is_heard=act > 3)

  def _finish(
    self, process: Process, push: Push, *, is_heard: bool = True
  ) -> None:
    if is_heard or not self._has_session(process):
      process.pushes.remove(push)
    if self._has_session(process):
      process.last_reply = push.reply
      self.laws.cover(push.reply, push.batches)
      self.say(push.reply, honest=self.laws.is_trusted(process.name))

  def merge(self, number: int) -> None:
    if self.merges:
      merge = self.merges.pop(number % len(self.merges))
      self.tell(
        events.Merged(
          fragment=merge.fragment, round=merge.round, version=merge.version
        )
      )

  def mark(self, number: int) -> None:
    self.tell(events.SnapshotRequested())

  def capture(self, number: int) -> None:
    """The syncer's own part of a cut is copied; then it is on its disk."""
    if not self.captures:
      return
    event = self.captures.pop(0)
    self.tell(event)
    if event.path or event.failure:
      return
    failure = "its disk is full" if number >> 4 & 7 == 7 else ""
    path = "" if failure else f"cut {event.snapshot}"
    self.captures.append(
      events.Captured(snapshot=event.snapshot, path=path, failure=failure)
    )

  def tick(self, number: int) -> None:
    at = machine.next_timer(self.state)
    if at is not None and at - self.now < (2.0, 6.0, 30.0)[number % 3]:
      self.now = max(self.now, at)
      self.tell(events.Ticked())

  def wait(self, number: int) -> None:
    self.now += _WAITS_S[number % len(_WAITS_S)]
    if number >> 8 & 1:
      self.tell(events.Ticked())

  def beat(self, number: int) -> None:
    _, process, _ = self._of(number)
    process.say(events.Heard())

  def join(self, number: int) -> None:
    slot, process, more = self._of(number)
    if process.is_over:
      self.slots[slot] = process = self._new_process(slot)
    if not process.connected or more % 8 == 0:
      self._join(process, takeover=bool(more >> 3 & 1))

  def _join(self, process: Process, *, takeover: bool) -> None:
    hello = process.hello(takeover=takeover)
    process.lose_stream()
    try:
      check.check(self.state, hello)
    except ValueError as error:
      if self.laws.is_trusted(process.name):
        raise Broken("honest words pass", f"{hello}: {error}") from error
      process.is_over = True  # After what was said in its name.
      return
    for effect in self.tell(hello, process):
      if isinstance(effect, events.Welcome):
        self._welcome(process, hello, effect)
      elif isinstance(effect, events.Reject):
        process.is_over = effect.code == "ABORTED" or self.is_finished

  def _welcome(
    self, process: Process, hello: events.Joined, welcome: events.Welcome
  ) -> None:
    first, process.down = process.down, type(process.down)()
    process.welcomed(hello, welcome, self.state.epoch)
    process.down.extend(first)  # Decided in the same step, after the welcome.

  # --- faults ---------------------------------------------------------------------

  def cut(self, number: int) -> None:
    _, process, more = self._of(number)
    self._cut(process, is_seen=bool(more & 1))

  def _cut(self, process: Process, *, is_seen: bool) -> None:
    process.lose_stream()
    who = process.name, process.incarnation
    if self.streams.get(who) is process and is_seen:
      del self.streams[who]
      self.tell(events.Disconnected(learner=who[0], incarnation=who[1]))

  def crash(self, number: int) -> None:
    """A process dies; or it is cut off, lives on, and another is started."""
    slot, process, more = self._of(number)
    if more & 1:
      self._cut(process, is_seen=bool(more & 2))
    if more & 4:
      self.ghosts = [*self.ghosts[-3:], process]
    self.slots[slot] = self._new_process(slot)
    if more & 8:
      self._join(self.slots[slot], takeover=bool(more & 48))

  def evict(self, number: int) -> None:
    _, process, _ = self._of(number)
    self.tell(events.EvictRequested(learner=process.name, reason="test"))

  def stall(self, number: int) -> None:
    """Bytes of a reply arrive; no more of them do, for a while."""
    slot, process, more = self._of(number)
    loudness = self.settings.loudness[slot]
    if not process.pushes:
      process.begin_push(loudness, per_lr=True)
    process.stalled = bool(process.pushes)
    if process.pushes and self._has_session(process):
      push = process.pushes[0]
      push.num_bytes += 1 + more % 3
      self.tell(_about(events.Pushing, push.reply, num_bytes=push.num_bytes))

  def leave(self, number: int) -> None:
    slot, process, _ = self._of(number)
    process.say(events.Left(reason="told to"))
    while process.up:
      self._up(process)
    process.is_over = True
    self.slots[slot] = self._new_process(slot)

  def again(self, number: int) -> None:
    _, process, _ = self._of(number)
    if process.last_reply and self._has_session(process):
      self.say(process.last_reply, honest=False)

  def ghost(self, number: int) -> None:
    """Words of a process that is over, or cut off, come late."""
    if not self.ghosts:
      return
    ghost = self.ghosts[number % len(self.ghosts)]
    number //= len(self.ghosts)
    if ghost.epoch != self.state.epoch or not ghost.incarnation:
      self.ghosts.remove(ghost)
      return
    evil.speak_as_ghost(self, ghost, number)

  def evil(self, number: int) -> None:
    _, process, more = self._of(number)
    evil.speak(self, process, more)

  def exhaust(self, number: int) -> None:
    self._of(number)[1].exhaust()

  def crash_syncer(self, number: int) -> None:
    """The syncer is killed, and restored from what its disk has.

    That is all it was told, unless the machine went down with it: then its
    last commit, or snapshot, is the last that is there.
    """
    saved = self.committed if self.settings.durable else self.on_disk
    if number >> 5 & 1:
      saved = self.state
    self.has_forgotten |= not (self.settings.durable or saved is self.state)
    self._restore(saved, self.rules, number)
    if number >> 4 & 1:  # All are back at once, and a cut is asked for.
      for process in self.slots:
        if not process.is_over:
          self._join(process, takeover=False)
      self.mark(0)

  def _restore(self, saved: machine.State, rules: Rules, number: int) -> None:
    self.now += (0.0, 0.5, 3.0, 20.0)[number & 3]
    text = json.dumps(machine.save(saved), allow_nan=False)
    values = json.loads(text)
    again = machine.save(machine.load(saved.rules, values))
    if json.dumps(again, allow_nan=False) != text:
      raise Broken("a state survives its disk", text)
    # A start that failed raises the epoch, too.
    epoch = self.state.epoch + 1 + (number >> 2 & 3 == 0)
    self.state = machine.restore(rules, values, epoch)
    self.rules = rules
    if self.told:
      versions = [tuple(f.version) for f in self.state.fragments]
      self.told(f"{self.now:8.2f} the syncer is restored: {versions}")
    self.committed = self.on_disk = self.state
    self.merges.clear()
    self.captures.clear()
    self.ghosts.clear()
    for process in self.streams.values():
      process.lose_stream()
    self.streams.clear()
    self.lingered = 0
    self.laws.restored(saved, self.state, durable=self.settings.durable)

  def snapshot(self, number: int) -> None:
    self.on_disk = self.state

  def silence(self, number: int) -> None:
    self.now += _SILENCES_S[number % len(_SILENCES_S)]
    if number >> 8 & 3:
      self.tell(events.Ticked())

  def linger(self, number: int) -> None:
    """Longer than a lease, each learner is away, only beats, or trains."""
    modes = [number >> 2 * slot & 3 for slot in range(len(self.slots))]
    if number >> 11 & 3 == 3:
      self.mark(0)
    merges = 0 if number >> 13 & 3 == 3 else 3 << 9  # Of `flow`'s number.
    for turn in range(6):
      self.now += self.rules.lease_s * 0.3
      for slot, process in enumerate(self.slots):
        if modes[slot] == 1:
          process.say(events.Heard())
          while process.up:
            self._up(process)
        elif modes[slot] > 1 or (turn == 5 and number >> 15 & 1):
          self.flow(slot + len(self.slots) * (merges | 15 << 4))
      self.tell(events.Ticked())

  def stop(self, number: int) -> None:
    """Asks for the end, or to cut it short; what is on its way may arrive."""
    for _ in range(1 + (number % 3 == 0)):
      self.tell(events.StopRequested(reason="SIGTERM"))
    for process in self.slots if number >> 4 & 1 else ():
      for push in tuple(process.pushes):
        self._finish(process, push)

  def extend(self) -> None:
    """A finished run is started again with bounds further away."""
    rules = self.rules
    more = dataclasses.replace(
      rules,
      num_syncer_steps=rules.num_syncer_steps and self.state.t + 20,
      num_tokens=rules.num_tokens and rules.num_tokens * 4,
    )
    for process in self.slots:
      process.rules = more
    self._restore(self.state, more, 0)


def _about(
  kind: Callable[..., events.LearnerEvent], reply: events.Replied, **fields
) -> events.LearnerEvent:
  """An event about the transfer of one reply."""
  return kind(
    learner=reply.learner,
    incarnation=reply.incarnation,
    fragment=reply.fragment,
    round=reply.round,
    attempt=reply.attempt,
    **fields,
  )


def run(
  schedule: Schedule,
  laws: Laws,
  record: Record | None = None,
  restored: Callable[[str], None] | None = None,
) -> World:
  """Plays a schedule to its end.

  Args:
    schedule: To be played.
    laws: Check every event.
    record: Told of every event and what was decided.
    restored: Told in a sentence of every start of the syncer.

  Raises:
    Broken: A law does not hold.
  """
  world = World(schedule.settings, laws, record, restored)
  world.run(schedule.choices)
  if len(schedule.choices) == NUM_CHOICES:  # None are left out to shrink it.
    world.fill()
  world.conclude()
  return world
