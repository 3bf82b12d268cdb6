"""An honest learner's process and its link, one choice at a time.

It follows the rules of the learner's loop: copies of one boundary, a base for
every fragment, counts since its adoption; what it said is said again on a new
stream. Nothing is delivered before the world says so. (arXiv 2604.21428,
Sec. 3 and App. E.)
"""

import collections
import dataclasses
from typing import Any, NamedTuple

from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.events import ZERO, Counts, Position, Version
from ddiloco_jax.protocol.rules import Rules

Batch = tuple[int, int]  # (data shard, number)


class Copy(NamedTuple):
  """A fragment at a step boundary; `batches` are those of its steps."""

  base: Version
  counts: Counts
  positions: tuple[Position, ...]
  batches: tuple[Batch, ...]


class Push:
  """An answer on its way."""

  __slots__ = ("batches", "num_bytes", "reply")

  def __init__(self, reply: events.Replied, batches: tuple[Batch, ...]):
    self.reply, self.batches, self.num_bytes = reply, batches, 0


class Process:
  """What one process of a learner knows, and the queues of its link.

  Attributes:
    up, down: The control stream's messages that have not arrived.
    bases: What it trains from; None before its first adoption.
    copies: Per fragment, of a boundary.
    adoptions, reported: Its last words, for a new stream; adoptions are per
      fragment, since it was admitted.
    wanted: Fragments to fetch -> whether exactly.
    fresh: Fetched and not yet taken by the loop.
    held: Taken, and not yet adopted.
    trained: Per fragment, steps taken in all.
    admissions: How often it was admitted as a new one.
    batches: That it trained on, a step each.
    is_over: It does not join again.
    stalled: Its pushes do not move.
    takes_shards: It is the project's own learner: it obeys `Shards` and serves
      its state. Others read what they were welcomed with.
    reading: The shards that it was told to read, not looked at yet.
    returned: Shard -> where it stopped, of those that it gave up.
    marker: A cut that it has not saved its part of.
    recovered: Where its inner state is from, for a new stream.
  """

  def __init__(
    self,
    slot: int,
    nonce: str,
    rules: Rules,
    *,
    max_replies: int,
    takes_shards: bool,
  ):
    num = rules.num_fragments
    self.name, self.nonce, self.rules = f"L{slot}", nonce, rules
    self.max_replies, self.takes_shards = max_replies, takes_shards
    self.incarnation = self.epoch = self.step = self.t = 0
    self.connected = self.is_over = self.stopped = False
    self.waiting = self.exhausted = self.said_end = False
    self.has_started = self.stalled = False
    self.up: collections.deque[events.LearnerEvent] = collections.deque()
    self.down: collections.deque[Any] = collections.deque()
    self.bases: list[Version | None] = [None] * num
    self.counts = [ZERO] * num
    self.trained = [0] * num
    self.admissions = 0
    self.batches: list[Batch] = []
    self.copies: dict[int, Copy] = {}
    self.adoptions: dict[int, tuple[events.Applied, ...]] = {}
    self.reported: events.Reported | None = None
    self.wanted: dict[int, bool] = {}
    self.newest: dict[int, Version] = {}
    self.fresh: dict[int, tuple[Version, bool]] = {}
    self.held: dict[int, tuple[Version, bool]] = {}
    self.boundaries: dict[int, int] = {}
    self.pulls: dict[int, events.Pull] = {}
    self.pushes: list[Push] = []
    self.last_reply: events.Replied | None = None
    self.positions: tuple[Position, ...] = ()
    self.reading: tuple[Position, ...] | None = None
    self.returned: dict[int, int] = {}
    self.marker: events.Marker | None = None
    self.donor: events.Donor | None = None
    self.recovered: events.Recovered | None = None
    self.starts: tuple[int, ...] = ()

  # --- the stream ---------------------------------------------------------------

  def hello(self, *, takeover: bool) -> events.Joined:
    known = None not in self.bases
    bases = [base for base in self.bases if base] if known else []
    return events.Joined(
      learner=self.name,
      nonce=self.nonce,
      takeover=takeover,
      bases=tuple(bases),
      max_replies=self.max_replies,
      state_address=f"{self.name}:1" if self.takes_shards else "",
      takes_shards=self.takes_shards,
      reads=self._reads() if known else (),
      returned=self._returned() if known else (),
      adoptions=tuple(a.adoption for a in self._all_adoptions()),
    )

  def _all_adoptions(self) -> tuple[events.Applied, ...]:
    return tuple(a for mine in self.adoptions.values() for a in mine)

  def welcomed(
    self, hello: events.Joined, welcome: events.Welcome, epoch: int
  ) -> None:
    """A new stream is open: what was missed is wanted, and said again."""
    if not (welcome.reconnect and self.epoch == epoch):
      self.pulls.clear()
      self.pushes.clear()
      self.last_reply = None
    self.up.clear()
    self.down.clear()
    if self.epoch != epoch:  # If the run still ends, it is said again.
      self.stopped = self.said_end = False
      self.marker = None
    self.incarnation, self.epoch = welcome.incarnation, epoch
    self.connected, self.t = True, welcome.t
    self.starts = tuple(clock.n0 for clock in welcome.clocks)
    if not welcome.reconnect:
      self._begin(welcome)
    for p, clock in enumerate(welcome.clocks):
      newest = self.newest.get(p)
      if newest and self._is_rolled_back(p, newest):
        del self.newest[p]
        self.fresh.pop(p, None)
      if not self._is_known(p, clock.version):
        self.wanted[p] = False
    if not welcome.reconnect:
      adopted = () if hello.bases else self._all_adoptions()
      self.adoptions.clear()
      for applied in adopted:
        self._adopted(dataclasses.replace(applied, counts=ZERO))
    if self.recovered:
      self.say(self.recovered)
    if self.reported:
      self.say(self.reported)

  def _begin(self, welcome: events.Welcome) -> None:
    """For the syncer it is a new process, maybe with other data shards."""
    self.admissions += 1
    self.copies, self.returned, self.reading = {}, {}, None
    self.positions, self.donor = welcome.positions, welcome.donor
    self.counts = [ZERO] * len(self.counts)
    self.boundaries, self.reported = {}, None

  def say(self, event: events.LearnerEvent) -> None:
    if self.connected:
      event = dataclasses.replace(
        event, learner=self.name, incarnation=self.incarnation
      )
      self.up.append(event)

  def lose_stream(self) -> None:
    self.connected = False
    self.up.clear()
    self.down.clear()

  def hear(self, notice: Any) -> None:
    """Takes the next notice of the syncer."""
    match notice:
      case events.Pull(fragment=p):
        self.pulls[p] = notice
      case events.Publish(fragment=p):
        if notice.exact or not self._is_known(p, notice.version):
          self.wanted[p] = notice.exact
      case events.GiveUp(fragment=p):
        pull = self.pulls.get(p)
        name = (notice.round, notice.attempt)
        if pull and (pull.round, pull.attempt) == name:
          del self.pulls[p]
      case events.Shards():
        self.reading = notice.positions
      case events.Marker():
        self.marker = notice
      case events.Ending():
        self.stopped = True
      case events.Finished():
        self.is_over = True

  def fetched(self, p: int, version: Version, *, exact: bool) -> None:
    del self.wanted[p]
    if not self._is_rolled_back(p, version):
      self.newest[p] = version
      self.fresh[p] = (version, exact)

  def _is_known(self, p: int, version: Version) -> bool:
    newest = self.newest.get(p)
    return newest is not None and (newest == version or newest.n > version.n)

  def _is_rolled_back(self, p: int, version: Version) -> bool:
    return version.epoch < self.epoch and version.n > self.starts[p]

  # --- the loop -----------------------------------------------------------------

  def take(self) -> None:
    """The loop takes what was fetched; it adopts it later."""
    if self.has_started or len(self.fresh) == len(self.bases):
      cumulative = self.rules.wait_for_publication or self.rules.max_ahead
      if cumulative and not (self.has_started or self.held):
        self.step = self.t
      self.held |= self.fresh
      self.fresh = {}

  def boundary(self, tokens: int, mask: int) -> None:
    """One turn of the loop: adopt, maybe wait, train, copy, report.

    Args:
      tokens: Of the step.
      mask: Which fragments are copied beside those that were pulled.
    """
    self._change_shards()
    self.take()
    self._mark(mask)  # What came after a marker is no part of its cut.
    self._adopt_held()
    self._mark(mask)
    if not self.has_started or self.is_over:
      return
    if self.stopped:
      self._offer_last()
    elif self._must_wait():
      if not self.waiting:
        self.waiting = True
        self._report()
    elif not self.exhausted and not self.positions:
      self.exhaust()  # All that it read was taken from it.
    elif not self.exhausted:
      self._step(tokens, mask)

  def _change_shards(self) -> None:
    if self.reading is None:
      return
    wanted, self.reading = dict(self.reading), None
    reads = dict(self.positions)
    for shard in reads.keys() - wanted.keys():
      self.returned[shard] = reads.pop(shard)
    for shard in wanted.keys() - reads.keys():
      self.returned.pop(shard, None)
      reads[shard] = wanted[shard]
    self.positions = tuple(Position(*item) for item in sorted(reads.items()))

  def _mark(self, number: int) -> None:
    """Saves its part of a cut at the boundary at which it holds the clock."""
    marker = self.marker
    if marker is None or None in self.bases:
      return
    missed = [
      (base, version)
      for base, version in zip(self.bases, marker.clock)
      if base and base != version
    ]
    if any(a.n <= v.n or a.epoch < self.epoch for a, v in missed):
      return  # It is behind, or holds a version that was rolled back.
    self.marker = None
    why = "it trains from newer versions" if missed else ""
    if number >> 8 & 7 == 7:
      why = why or "its disk is full"
    self.say(
      events.MarkerDone(snapshot=marker.snapshot, saved=not why, reason=why)
    )

  def exhaust(self) -> None:
    if self.has_started and not (self.stopped or self.exhausted):
      self.exhausted = True
      self._report()

  def _adopt_held(self) -> None:
    for p, (version, exact) in tuple(self.held.items()):
      at = self.boundaries.get(p)
      delay = self.rules.adoption_delay_steps
      if at is not None and self.step - at < delay and not exact:
        continue
      del self.held[p]
      applied = events.Applied(
        fragment=p,
        version=version,
        step=self.step,
        counts=self.counts[p],
        exact=exact,
      )
      self._adopted(applied)
      self.bases[p], self.counts[p] = version, ZERO
      self.copies.pop(p, None)
      self.boundaries.pop(p, None)
      if self.reported:
        self.reported = self._without(self.reported, p)
    if not self.has_started and None not in self.bases:
      self.has_started = True
      if any(base and base.n for base in self.bases):
        self._say_recovered()

  def _adopted(self, applied: events.Applied) -> None:
    p = applied.fragment
    mine = (*self.adoptions.get(p, ()), applied)
    self.adoptions[p] = mine[-events.MAX_ADOPTIONS :]
    self.say(applied)

  def _say_recovered(self) -> None:
    """It joined a run under way, and has its inner state from somewhere."""
    donor = self.donor
    self.recovered = events.Recovered(
      source="peer" if donor else "fresh",
      donor=donor.learner if donor else "",
    )
    self.say(self.recovered)

  def _without(self, report: events.Reported, p: int) -> events.Reported:
    counts = list(report.counts)
    counts[p] = ZERO
    kept = tuple(b for b in report.boundaries if b[0] != p)
    return dataclasses.replace(report, counts=tuple(counts), boundaries=kept)

  def _must_wait(self) -> bool:
    rules = self.rules
    if rules.max_ahead:
      return self.step - self.t > rules.max_ahead
    if not rules.wait_for_publication:
      return False
    last = rules.num_syncer_steps
    return 0 < last <= self.step or any(
      self.step - at >= rules.adoption_delay_steps
      for at in self.boundaries.values()
    )

  def _step(self, tokens: int, mask: int) -> None:
    self.step += 1
    self.waiting = False
    self.counts = [Counts(c[0] + 1, c[1] + tokens) for c in self.counts]
    self.trained = [n + 1 for n in self.trained]
    (shard, batch), *others = self.positions  # One shard after the other.
    self.batches.append((shard, batch))
    self.positions = (*others, Position(shard, batch + 1))
    self._copy(mask)
    self._report()

  def _copy(self, mask: int) -> None:
    num, cycle = self.rules.num_fragments, self.rules.cycle_steps
    if self.rules.wait_for_publication:
      due = [
        p
        for p in range(num)
        if self.step % cycle == p * cycle // num and p not in self.boundaries
      ]
      self.boundaries.update({p: self.step for p in due})
    else:
      self.copies = {}
      due = [p for p in range(num) if mask >> p & 1 or p in self.pulls]
    self._offer(due)
    if self.rules.wait_for_publication:
      at = self.boundaries
      self.copies = {p: c for p, c in self.copies.items() if p in at}
      self.boundaries = {p: at[p] for p in at if p in self.copies}

  def _offer(self, due: Any) -> None:
    for p in due:
      base, counts = self.bases[p], self.counts[p]
      if base is not None and counts.steps:
        covered = tuple(sorted((*self.positions, *self._returned())))
        batches = tuple(self.batches[-counts.steps :])
        self.copies[p] = Copy(base, counts, covered, batches)

  def _offer_last(self) -> None:
    if not self.said_end:
      self.said_end = True
      self.copies = {}
      self._offer(range(len(self.bases)))

  def _reads(self) -> tuple[int, ...]:
    return tuple(sorted(shard for shard, _ in self.positions))

  def _returned(self) -> tuple[Position, ...]:
    return tuple(Position(*i) for i in sorted(self.returned.items()))

  def _report(self) -> None:
    self.reported = events.Reported(
      step=self.step,
      counts=tuple(self.counts),
      positions=tuple(sorted(self.positions)),
      returned=self._returned(),
      boundaries=tuple(sorted(self.boundaries.items())),
      waiting=self.waiting,
      exhausted=self.exhausted,
    )
    self.say(self.reported)

  # --- answers ------------------------------------------------------------------

  def begin_push(self, loudness: float, *, per_lr: bool) -> Push | None:
    """Answers a pull from a copy, if it has one and the link is free."""
    if len(self.pushes) >= self.max_replies:
      return None
    p = next((p for p in self.pulls if p in self.copies), None)
    if p is None:
      return None
    pull = self.pulls.pop(p)
    base, counts, positions, batches = self.copies[p]
    reply = events.Replied(
      learner=self.name,
      incarnation=self.incarnation,
      fragment=p,
      round=pull.round,
      attempt=pull.attempt,
      base=base,
      counts=counts,
      norm=loudness * counts.steps,
      lr_sum=float(counts.steps) if per_lr else 0.0,
      positions=positions,
    )
    push = Push(reply, batches)
    self.pushes.append(push)
    return push
