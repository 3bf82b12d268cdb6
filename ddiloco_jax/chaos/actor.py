"""A learner in virtual time: its loop's bookkeeping, without a thread or a wait.

It says the events that a real learner's link says, at the times that it is
told. (arXiv 2604.21428, Sec. 3.)
"""

from collections.abc import Iterator
from typing import NamedTuple

from ddiloco_jax.chaos.traffic import LinkConfig, Way
from ddiloco_jax.protocol import events, schedule
from ddiloco_jax.protocol.events import ZERO, Counts, Position, Version
from ddiloco_jax.protocol.rules import Rules


class Arrival(NamedTuple):
  """A publication that has come, or will."""

  at_s: float
  fragment: int
  version: Version


class Actor:
  """One learner's process, since it was welcomed.

  Attributes:
    name: Its learner id.
    incarnation: As the syncer numbered it; 0 before it was welcomed.
    up, down: Its link, each way.
    step, tokens: Its own, in all.
    t: The syncer's step, as it knows it.
    waiting: It takes no step until something arrives.
    said_at: When it last said anything.
    pulls: Fragment -> one that it had no copy for.
  """

  def __init__(self, name: str, rules: Rules, link: LinkConfig):
    self.name, self._rules = name, rules
    self.up, self.down = Way(link, link.up_bits), Way(link, link.down_bits)
    self._slots = schedule.slots(rules.num_fragments, rules.cycle_steps)
    self.incarnation = self.step = self.tokens = self.t = 0
    self.waiting = False
    self.said_at = 0.0
    self.pulls: dict[int, events.Pull] = {}
    self._bases: list[Version] = []
    # Per fragment, step and tokens when it was adopted.
    self._since: list[tuple[int, int]] = []
    self._arriving: list[Arrival] = []
    self._boundaries: dict[int, int] = {}
    self._copied: dict[int, Counts] = {}  # At its boundary.
    self._unsaid: list[events.Adoption] = []  # While no syncer was there.
    self._position = Position(0, 0)

  def welcomed(
    self, welcome: events.Welcome, now: float
  ) -> Iterator[events.LearnerEvent]:
    """A new process begins from the clock of its welcome; what it says."""
    rules = self._rules
    self.incarnation, self.t = welcome.incarnation, welcome.t
    is_cumulative = rules.wait_for_publication or rules.max_ahead > 0
    self.step, self.tokens = welcome.t if is_cumulative else 0, 0
    self._bases = [clock.version for clock in welcome.clocks]
    self._since = [(self.step, 0)] * len(self._bases)
    self._arriving, self._boundaries, self._copied = [], {}, {}
    self.pulls, self._unsaid = {}, []
    self._position = welcome.positions[0]
    for p, version in enumerate(self._bases):
      yield self._applied(now, p, version, ZERO)

  def hello(self, now: float) -> events.Joined:
    """It comes to a syncer again: the same process, with what it holds."""
    return events.Joined(
      time=now,
      learner=self.name,
      nonce=f"{self.name}-{self.incarnation}",
      bases=tuple(self._bases),
      reads=(self._position.shard,),
      adoptions=tuple(self._unsaid),
    )

  def reconnected(self) -> None:
    """What was on its way between the two is lost."""
    self._arriving, self.pulls, self._unsaid = [], {}, []

  def told(self, arrival: Arrival) -> None:
    """A publication is on its way to it."""
    self._arriving.append(arrival)

  def stepped(self, now: float, tokens: int) -> events.Reported:
    """It has taken a step."""
    self.step += 1
    self.tokens += tokens
    shard, batch = self._position
    self._position = Position(shard, batch + 1)
    if self._rules.wait_for_publication:
      p = self._slots.get(self.step % self._rules.cycle_steps)
      if p is not None and p not in self._boundaries:
        self._boundaries[p] = self.step
        self._copied[p] = self._counts(p)
    return self.report(now)

  def adopt(self, now: float) -> Iterator[events.Applied]:
    """It adopts what has arrived, at a boundary."""
    if not self._arriving:
      return
    late: list[Arrival] = []
    newest: dict[int, Version] = {}
    for arrival in self._arriving:
      if arrival.at_s > now or self._is_held(arrival.fragment):
        late.append(arrival)
      else:
        newest[arrival.fragment] = arrival.version
    self._arriving = late
    for p, version in newest.items():
      counts = self._counts(p)
      self._bases[p] = version
      self._since[p] = self.step, self.tokens
      self._boundaries.pop(p, None)
      self._copied.pop(p, None)
      yield self._applied(now, p, version, counts)

  def must_wait(self) -> bool:
    """Whether it takes no step before something arrives."""
    rules = self._rules
    if rules.max_ahead:
      return self.step - self.t > rules.max_ahead
    if not rules.wait_for_publication:
      return False
    delay = rules.adoption_delay_steps
    return any(self.step - at >= delay for at in self._boundaries.values())

  def report(self, now: float) -> events.Reported:
    self.said_at = now
    step, tokens = self.step, self.tokens
    return events.Reported(
      time=now,
      learner=self.name,
      incarnation=self.incarnation,
      step=step,
      counts=tuple([Counts(step - s, tokens - n) for s, n in self._since]),
      positions=(self._position,),
      boundaries=tuple(self._boundaries.items()),
      waiting=self.waiting,
    )

  def reply(self, pull: events.Pull, now: float) -> events.Replied | None:
    """The answer to a pull; None as long as there is nothing to answer with."""
    p = pull.fragment
    is_ready = not self._rules.wait_for_publication or p in self._copied
    counts = self._copied.get(p) or self._counts(p)
    if not is_ready or counts.steps < 1:
      return None
    self.said_at = now
    return events.Replied(
      learner=self.name,
      incarnation=self.incarnation,
      fragment=pull.fragment,
      round=pull.round,
      attempt=pull.attempt,
      base=self._bases[pull.fragment],
      counts=counts,
      norm=float(counts.steps),
      lr_sum=float(counts.steps),
      positions=(self._position,),
    )

  def _is_held(self, p: int) -> bool:
    """A copy that was made for a boundary fixes when it is replaced."""
    at = self._boundaries.get(p)
    return at is not None and self.step - at < self._rules.adoption_delay_steps

  def _counts(self, p: int) -> Counts:
    step, tokens = self._since[p]
    return Counts(self.step - step, self.tokens - tokens)

  def _applied(
    self, now: float, p: int, version: Version, counts: Counts
  ) -> events.Applied:
    self.said_at = now
    return events.Applied(
      time=now,
      learner=self.name,
      incarnation=self.incarnation,
      fragment=p,
      version=version,
      step=self.step,
      counts=counts,
    )
