"""A run of learners and a syncer in virtual time: the heap, and what is on it.

The syncer decides by the same state machine as a real one; what is modelled are
steps, transfers, merges and failures. (arXiv 2604.21428, Sec. 5.)
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any

from ddiloco_jax.chaos import tally
from ddiloco_jax.chaos.actor import Actor, Arrival
from ddiloco_jax.chaos.job import Fleet, Step
from ddiloco_jax.chaos.scenario import Scenario, StepTimes
from ddiloco_jax.protocol import events, machine


class Simulation:
  """One run.

  Args:
    cfg: See Scenario.
    record: Called with every event of the machine, its effects and the state.

  Attributes:
    state: Of the machine.
    now: Virtual time, seconds.
    num_turns: Of the heap.
    tally: What it came to so far.
  """

  def __init__(
    self,
    cfg: Scenario,
    record: Callable[..., None] = lambda event, effects, state: None,
  ):
    self._cfg, self._record = cfg, record
    rules, num = cfg.sync, cfg.learners.num
    self.state = machine.initial(rules)
    self._fleet = Fleet(cfg.fleet, cfg.repair, cfg.run.seed, num)
    self.actors = [Actor(f"L{n}", rules, cfg.link) for n in range(num)]
    self._by_name = {actor.name: n for n, actor in enumerate(self.actors)}
    self._standing = [False] * num
    self._steps = StepTimes(cfg.learners, cfg.run.seed)
    self._params = cfg.learners.num_params // rules.num_fragments
    self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
    self._order = itertools.count()
    self._tick_at = math.inf
    self._merged_at = 0.0
    self.now, self.num_turns = 0.0, 0
    self.tally = tally.Tally(cfg.run.duration_s, num)
    self._react = {
      events.Welcome: self._welcomed,
      events.Pull: self._pull,
      events.GiveUp: self._gave_up,
      events.Merge: self._merge,
      events.Publish: self._publish,
    }

  def run(self, look: Callable[[float], None] = lambda now: None) -> None:
    """Simulates it all.

    Args:
      look: Called now and then with the virtual time.
    """
    for n, actor in enumerate(self.actors):
      hello = events.Joined(learner=actor.name, nonce=f"{actor.name}-0")
      self._at(0.0, self._feed, hello)
      self._at(0.0, self._keep_alive, n)
    heap, end_s = self._heap, self._cfg.run.duration_s
    while heap[0][0] < end_s:
      self.now, _, do, what = heapq.heappop(heap)
      do(what)
      self.num_turns += 1
      if not self.num_turns % 10_000:
        look(self.now)
    self.now = end_s

  def _at(self, time_s: float, do: Callable[[Any], None], what: Any) -> None:
    heapq.heappush(self._heap, (time_s, next(self._order), do, what))

  # --- the syncer -----------------------------------------------------------------

  def _feed(self, event: events.Event) -> None:
    """The machine consumes an event; what it decides is on its way."""
    before = self.state
    self.state, effects = machine.step(before, event)
    self.tally.num_events += 1
    self._record(event, effects, self.state)
    for effect in effects:
      react = self._react.get(type(effect))
      if react:
        react(effect)
    if self._cfg.sync.max_ahead and self.state.t != before.t:
      for n, actor in enumerate(self.actors):
        if actor.waiting:
          self._at(self.now, self._wake, n)
    tick_at = machine.next_timer(self.state)
    if tick_at is not None and tick_at < self._tick_at:
      self._tick_at = tick_at
      self._at(tick_at, self._tick, tick_at)

  def _tick(self, at_s: float) -> None:
    if at_s == self._tick_at:  # Else an earlier one came in between.
      self._tick_at = math.inf
      self._feed(events.Ticked(time=self.now))

  def _welcomed(self, effect: events.Welcome) -> None:
    self._at(self.now, self._join, effect)

  def _join(self, effect: events.Welcome) -> None:
    n = self._by_name[effect.learner]
    for said in self.actors[n].welcomed(effect, self.now):
      self._feed(said)
    self._begin_step(n)

  def _pull(self, effect: events.Pull) -> None:
    self._at(self.now + self._cfg.link.latency_s, self._pulled, effect)

  def _gave_up(self, effect: events.GiveUp) -> None:
    for actor in self.actors:
      pull = actor.pulls.get(effect.fragment)
      if pull and (pull.round, pull.attempt) == (effect.round, effect.attempt):
        del actor.pulls[effect.fragment]

  def _merge(self, effect: events.Merge) -> None:
    self.tally.note_merge(effect, self.state)
    self._merged_at = (
      max(self.now, self._merged_at) + self._cfg.learners.merge_s
    )
    merged = events.Merged(
      time=self._merged_at,
      fragment=effect.fragment,
      round=effect.round,
      version=effect.version,
    )
    self._at(self._merged_at, self._feed, merged)

  def _publish(self, effect: events.Publish) -> None:
    told_at = self.now + self._cfg.link.latency_s
    for receiver in effect.receivers:
      n = self._by_name[receiver.learner]
      actor = self.actors[n]
      at_s = actor.down.send(told_at, self._params)
      actor.told(Arrival(at_s, effect.fragment, effect.version))
      if actor.waiting:
        self._at(at_s, self._wake, n)

  # --- the learners ---------------------------------------------------------------

  def _keep_alive(self, n: int) -> None:
    """A learner's link says that it is there when nothing else is said."""
    actor, every_s = self.actors[n], self._cfg.sync.lease_s / 3
    if actor.incarnation and self.now >= actor.said_at + every_s:
      actor.said_at = self.now
      self._feed(
        events.Heard(
          time=self.now, learner=actor.name, incarnation=actor.incarnation
        )
      )
    self._at(max(self.now, actor.said_at) + every_s, self._keep_alive, n)

  def _begin_step(self, n: int) -> None:
    actor, now = self.actors[n], self.now
    for applied in actor.adopt(now):
      self._feed(applied)
    actor.t = self.state.t
    if actor.must_wait():
      if not actor.waiting:
        actor.waiting = True
        self._feed(actor.report(now))
      return
    actor.waiting = False
    step = self._fleet.next_step(n, now, self._steps.draw(n))
    if step.start_s > now:
      self._standing[n] = True
      self._at(step.start_s, self._go_on, (n, step))
    else:
      self._run_step((n, step))

  def _go_on(self, what: tuple[int, Step]) -> None:
    n, _ = what
    self._standing[n] = False
    for applied in self.actors[n].adopt(self.now):
      self._feed(applied)
    self._answer_pulls(n)
    self._run_step(what)

  def _run_step(self, what: tuple[int, Step]) -> None:
    self.tally.note_step(*what)
    self._at(what[1].end_s, self._stepped, what)

  def _stepped(self, what: tuple[int, Step]) -> None:
    n, step = what
    tokens = round(self._cfg.learners.tokens_per_step * step.share)
    self._feed(self.actors[n].stepped(self.now, tokens))
    self._answer_pulls(n)
    self._begin_step(n)

  def _wake(self, n: int) -> None:
    if self.actors[n].waiting:
      self._begin_step(n)

  def _pulled(self, pull: events.Pull) -> None:
    n = self._by_name[pull.learner]
    if self.actors[n].incarnation != pull.incarnation:
      return
    if self._standing[n] or not self._answer(n, pull):
      self.actors[n].pulls[pull.fragment] = pull

  def _answer_pulls(self, n: int) -> None:
    pulls = self.actors[n].pulls
    for p in tuple(pulls):
      if self._answer(n, pulls[p]):
        del pulls[p]

  def _answer(self, n: int, pull: events.Pull) -> bool:
    actor = self.actors[n]
    reply = actor.reply(pull, self.now)
    if reply is None:
      return False
    at_s = actor.up.send(self.now, self._params)
    every_s = self._cfg.sync.min_deadline_s / 2
    said_s = self.now + self._cfg.link.latency_s
    while said_s + every_s < at_s:
      pushing = events.Pushing(
        time=said_s,
        learner=actor.name,
        incarnation=actor.incarnation,
        fragment=pull.fragment,
        round=pull.round,
        attempt=pull.attempt,
        num_bytes=int(1e6 * (said_s - self.now)),
      )
      self._at(said_s, self._feed, pushing)
      said_s += every_s
    self._at(at_s, self._feed, dataclasses.replace(reply, time=at_s))
    return True
