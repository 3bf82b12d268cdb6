"""A machine told event by event, for tests that spell out every message."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ddiloco_jax.protocol import events, machine, status, waiting
from ddiloco_jax.protocol.events import Counts, Version
from ddiloco_jax.protocol.rules import Rules

# One fragment, due at every step: the smallest run in which a round opens.
ONE = Rules(num_fragments=1, cycle_steps=1)
# One fragment, due at every fourth: all have progress when it opens.
FOUR = Rules(num_fragments=1, cycle_steps=4)


class Hand:
  """Remembers what each process last said, so that a test says only news."""

  def __init__(self, rules: Rules = ONE, state: machine.State | None = None):
    self.rules = rules
    self.state = machine.initial(rules) if state is None else state
    self.now = self.state.now
    self.effects: list[events.Effect] = []
    self.incarnations: dict[str, int] = {}
    self.steps: dict[str, int] = {}
    self.counts: dict[str, list[Counts]] = {}
    self.bases: dict[str, list[Version]] = {}

  def tell(self, event: events.Event) -> list[Any]:
    event = dataclasses.replace(event, time=self.now)
    self.state, effects = machine.step(self.state, event)
    self.effects += effects
    return list(effects)

  def tick(self, dt: float) -> list[Any]:
    self.now += dt
    return self.tell(events.Ticked())

  def of(self, kind: type) -> list[Any]:
    return [e for e in self.effects if isinstance(e, kind)]

  def where(self, name: str) -> dict[str, Any]:
    return {"learner": name, "incarnation": self.incarnations[name]}

  def join(self, name: str, nonce: str = "", **more) -> list[Any]:
    """Joins; a process that is admitted adopts what the welcome names."""
    effects = self.tell(
      events.Joined(learner=name, nonce=nonce or f"{name}-0", **more)
    )
    for effect in effects:
      if isinstance(effect, events.Welcome):
        self.incarnations[name] = effect.incarnation
        if not effect.reconnect:
          self.steps[name] = effect.t
          num = len(effect.clocks)
          self.counts[name] = [Counts()] * num
          self.bases[name] = [clock.version for clock in effect.clocks]
          for p in range(num):
            self.apply(name, p, effect.clocks[p].version)
    return effects

  def report(self, name: str, steps: int = 1, tokens: int = 100, **more):
    """Reports more steps, each of so many tokens."""
    self.steps[name] += steps
    self.counts[name] = [
      Counts(c.steps + steps, c.tokens + steps * tokens)
      for c in self.counts[name]
    ]
    return self.tell(
      events.Reported(
        **self.where(name),
        step=self.steps[name],
        counts=tuple(self.counts[name]),
        **more,
      )
    )

  def apply(
    self, name: str, p: int = 0, version: Version | None = None, exact=False
  ):
    version = version or self.state.fragments[p].version
    effects = self.tell(
      events.Applied(
        **self.where(name),
        fragment=p,
        version=version,
        step=self.steps[name],
        counts=self.counts[name][p],
        exact=exact,
      )
    )
    self.counts[name][p] = Counts()
    self.bases[name][p] = version
    return effects

  def pull(self, name: str) -> events.Pull:
    """The newest pull that was sent to a learner."""
    return next(e for e in reversed(self.of(events.Pull)) if e.learner == name)

  def reply(self, name: str, pull: events.Pull | None = None, **more):
    pull = pull or self.pull(name)
    p = pull.fragment
    fields: dict[str, Any] = {
      "base": self.bases[name][p],
      "counts": self.counts[name][p],
      "norm": 1.0,
      "lr_sum": 1.0,
      **more,
    }
    return self.tell(
      events.Replied(
        learner=name,
        incarnation=pull.incarnation,
        fragment=p,
        round=pull.round,
        attempt=pull.attempt,
        **fields,
      )
    )

  def push(self, name: str, num_bytes: int, pull: events.Pull | None = None):
    pull = pull or self.pull(name)
    return self.tell(
      events.Pushing(
        **self.where(name),
        fragment=pull.fragment,
        round=pull.round,
        attempt=pull.attempt,
        num_bytes=num_bytes,
      )
    )

  def merged(self) -> list[Any]:
    """The merge worker has done what it was told last."""
    merge = self.of(events.Merge)[-1]
    return self.tell(
      events.Merged(
        fragment=merge.fragment, round=merge.round, version=merge.version
      )
    )

  def cycle(self, names: Sequence[str], dt: float = 1.0) -> None:
    """A step of each; every pull is answered, merged and adopted at once."""
    self.now += dt
    for name in names:
      self.report(name)
    self.serve(names)

  def serve(self, names: Sequence[str]) -> None:
    """Answers, merges and adopts until nothing is left to do at this time."""
    num_merges = len(self.of(events.Merge))
    for name in names:
      while self.state.learners[name].asked:
        self.reply(name)
    for r in self.state.rounds:
      if r.grace_end is not None and not r.merging:
        self.tick(max(0.0, r.grace_end - self.now))
    if len(self.of(events.Merge)) > num_merges:
      self.merged()
      for name in names:
        self.apply(name)

  def until_asked(self, names: Sequence[str]) -> None:
    """Steps, a second each, until a new round has asked all of these."""
    for _ in range(20):
      self.now += 1.0
      for name in names:
        self.report(name)
      if all(self.state.learners[name].asked for name in names):
        return
    raise AssertionError(self.waiting_for())

  def totals(self, name: str, p: int = 0):
    return status.account_totals(self.state, name, p)

  def waiting_for(self) -> str:
    return waiting.wait(self.state, self.now).sentence


def only(effects: Sequence[Any], kind: type) -> Any:
  """The one effect of a kind."""
  found = [e for e in effects if isinstance(e, kind)]
  assert len(found) == 1, effects
  return found[0]


def all_of(effects: Sequence[Any], kind: type) -> list[Any]:
  return [e for e in effects if isinstance(e, kind)]
