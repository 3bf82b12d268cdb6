"""The laws of the protocol, checked after each event against a book of its own.

What an effect promised is remembered here, apart from the machine's state, so
that a state that is wrong in itself cannot vouch for it. (arXiv 2604.21428,
Sec. 3; the laws are the project's specification.)
"""

import math
from typing import NamedTuple

from ddiloco_jax.protocol import events, ledger, machine, status
from ddiloco_jax.protocol.events import (
  ZERO,
  Counts,
  Effect,
  Event,
  LearnerEvent,
  Outcome,
  ReplyKey,
  Version,
)
from ddiloco_jax.protocol.state import Learner, Round, State

from .process import Batch
from .reasons import Reached

# Law -> what it says. Each is checked after each event where it may break.
LAWS = {
  "no event raises": "the machine takes any event in any state",
  "a step is pure": "the same state and event give the same again",
  "honest words pass": "the service's check refuses no honest learner",
  "every decision says why": "each effect carries a reason; a cut "
  "only if it is not taken",
  "ledger": "reported = merged + discarded + pending, none negative, merged "
  "never more than reported, reported never less",
  "counted once": "a merge books exactly the counts of its replies as merged, "
  "and nothing else does",
  "nothing said is lost": "what a process reported is in its books",
  "nothing is invented": "no book has more steps than were taken",
  "every step is booked": "a process that was admitted once, and has said all, "
  "finds every step that it took in the books",
  "buffers": "each accepted reply waits in a round or for one, until it is "
  "merged or freed, once",
  "resolved once": "each reply is answered once, and asking again tells the "
  "first answer",
  "answers pulls": "a reply is taken only if it was pulled, and finite",
  "fence": "nothing is taken from an incarnation that is over or unknown",
  "incarnations": "each admission has a number of its own, later than all",
  "contiguous versions": "a fragment's version changes by its merge alone, "
  "and by one",
  "restart": "a restart has every durable version, raises the epoch, says "
  "where each fragment starts, keeps the books, and believes nobody live",
  "one base, one merge": "no learner is merged again from a base older than "
  "what it was merged into",
  "one batch, one merge": "no batch of a data shard is merged into a fragment "
  "twice, whoever trained on it",
  "bases": "a merged base is a version of this history, and not too old",
  "members": "a round asks whom its rules allow; only they, and carried "
  "replies, are merged",
  "weights": "a reply weighs tokens * tokens / steps",
  "quorum": "a merge has its quorum, and a weight above 0",
  "rounds": "one round per fragment, tau in all, one entry per fragment in "
  "the queue",
  "under way": "a pull that is under way belongs to an open round that waits "
  "for it, or is carried and watched",
  "pulls": "a pull is sent once, or again to who reconnects; max_replies at "
  "once",
  "pace": "t never goes back, and advances by one, when K learners have "
  "stepped and it is time; only with the learners' own index otherwise",
  "published to all": "a new version is told to every learner on a stream, "
  "with what became of its reply",
  "liveness": "who is live was heard within the lease; the cached counts count",
  "timers": "the next timer lies ahead, and every open round has one",
  "accepted positions": "the accepted position of a shard never goes back",
  "shards": "a shard has one owner and one reader at most, and who is over "
  "reads none",
  "donors": "a donor is another process that is live, trains, and serves "
  "its state",
  "cuts": "a marker tells the newest versions to all that are live, while no "
  "round is open; none opens until all hold them and the syncer has a copy; "
  "a cut ends once, and names each that was live then, or may be back",
  "who is in a cut": "the learners of a cut hold valid bases of its clock",
  "the end": "an end is not taken back; it finishes with all books closed",
  "a state survives its disk": "save and load keep the digest",
  "status": "a status and its sentence can be made of every state",
  "progress": "when faults end, a merge comes, or the run ends",
  "quiet": "when all fall silent, every round ends and no timer is left",
}
_TAKEN = (Outcome.ACCEPTED, Outcome.CARRIED)
_SAMPLED_EVERY = 50  # Events between two checks that are expensive.


class Broken(Exception):
  """A law does not hold."""

  def __init__(self, law: str, text: str):
    assert law in LAWS, law
    super().__init__(f"{law} ({LAWS[law]}): {text}")
    self.law = law


class _Taken(NamedTuple):
  reply: events.Replied
  carried: bool


class Laws:
  """What was promised so far in one schedule.

  Attributes:
    reached: Counts the reasons of effects, over all schedules.
    num_unfit: Malicious words that the service's check refused.
  """

  def __init__(self, reached: Reached | None = None):
    self.reached = reached
    self.num_unfit = 0
    self.num_events = 0

  def begin(self, state: State) -> None:
    """A new run."""
    self._last_incarnation = 0
    self._distrusted: set[str] = set()
    # Per fragment: batch -> the version that it was merged into, and whose.
    self._batches: list[dict[Batch, tuple[int, ReplyKey]]] = [
      {} for _ in state.fragments
    ]
    self._begin_epoch(state)

  def _begin_epoch(self, state: State) -> None:
    self._pulled: set[ReplyKey] = set()
    self._covered: dict[ReplyKey, tuple[Batch, ...]] = {}
    self._answers: dict[ReplyKey, Outcome] = {}
    self._newest: dict[tuple[str, int], tuple[ReplyKey, ...]] = {}
    self._buffers: dict[ReplyKey, _Taken] = {}
    self._merging: dict[int, dict[ReplyKey, Counts]] = {}
    self._stepped: set[str] = set()
    self._merged_n: dict[tuple[str, int], int] = {}
    self._totals: dict[tuple[str, int], ledger.Totals] = {}
    self._said: dict[tuple[str, int], tuple[int, int]] = {}
    self._num_ended = 0
    self._cut: events.Marker | None = None
    self._awaited: set[tuple[str, int]] = set()
    self._in_cut: set[str] = set()
    self._away: set[str] = set()
    # Learner -> when its process was last heard, if that is over for good.
    self._over = {
      m.learner: m.heard_at for m in state.learners.values() if m.gone
    }
    self._evicted = {
      m.learner for m in state.learners.values() if m.nonce in m.evicted_nonces
    }
    self._marked_at = 0.0
    self._copied = False
    self._versions = [f.version for f in state.fragments]
    for name, row in state.accounts.items():
      for p, account in enumerate(row):
        self._merged_n[name, p] = account.merged_n
        for a in account.answers:
          key = ReplyKey(name, a.incarnation, p, a.round, a.attempt)
          self._answer(key, a.outcome)
        totals = status.account_totals(state, name, p)
        self._totals[name, p] = totals
        learner = state.learners[name]
        base = learner.bases[p] or Version(0, 0)
        span = ledger.find(account, learner.incarnation, base)
        last = span.said.steps if span else 0
        self._said[name, p] = (totals.reported.steps, last)
    self._last_incarnation = max(
      (m.incarnation for m in state.learners.values()), default=0
    )

  def distrust(self, event: LearnerEvent, state: State) -> None:
    """A malicious word comes from this process, if it is the current one."""
    known = state.learners.get(event.learner)
    if known is not None and known.incarnation == event.incarnation:
      self._distrusted.add(event.learner)

  def is_trusted(self, learner: str) -> bool:
    """Whether nobody has lied in its name."""
    return learner not in self._distrusted

  def cover(self, reply: events.Replied, batches: tuple[Batch, ...]) -> None:
    """An honest process says that its reply covers these batches.

    One that is asked again on a new stream may answer twice: the first counts.
    """
    key = _key(reply)
    if self._answers.get(key) not in _TAKEN:
      self._covered[key] = batches

  # --- after each event -----------------------------------------------------------

  def check(
    self,
    before: State,
    event: Event,
    after: State,
    effects: tuple[Effect, ...],
  ) -> None:
    """Raises Broken if a step of the machine broke a law."""
    self.num_events += 1
    # A shard may be lent, and its late reader fenced, at the very event.
    current = _speaker(before, event) if _speaker(after, event) else None
    if isinstance(event, events.Reported) and current:
      if event.step > current.step:
        self._stepped.add(event.learner)
      self._note_said(current, event.counts)
    self._answered(event, effects)
    merged: dict[ReplyKey, Counts] = {}
    if isinstance(event, events.Merged):
      merged = self._versions_moved(before, event, after)
    else:
      self._versions_stand(before, after)
    if isinstance(event, events.Captured):
      self._captured(event)
    if isinstance(event, events.Left) and (old := _speaker(before, event)):
      self._over[event.learner] = old.heard_at
    if isinstance(event, events.EvictRequested):
      self._evicted.add(event.learner)
    if self._cut:
      self._skip(before, event, after)
    for effect in effects:
      self._obeyed(before, event, after, effect)
    self._books(before, event, after, merged)
    self._buffered(after)
    self._fenced(before, event, after)
    self._paced(before, after)
    self._rounds(after)
    self._live(before, after)
    if before.learners is not after.learners:
      self._shards(after)
    self._time(before, after)
    if self.num_events % _SAMPLED_EVERY == 0:
      self.sampled(after)

  def restored(self, saved: State, state: State, *, durable: bool) -> None:
    """The syncer was started again from `saved`."""
    if state.epoch <= saved.epoch or len(state.starts) != state.epoch:
      raise Broken("restart", f"epoch {saved.epoch} -> {state.epoch}")
    for p, fragment in enumerate(state.fragments):
      if fragment != saved.fragments[p]:
        raise Broken("restart", f"fragment {p}: {fragment}")
      if state.starts[-1][p] != fragment.version.n:
        raise Broken("restart", f"n0 of {p} is {state.starts[-1][p]}")
    if durable and self._versions != [f.version for f in state.fragments]:
      raise Broken("restart", f"published {self._versions}: {state.fragments}")
    for learner in state.learners.values():
      if learner.live or learner.training or learner.connected or learner.asked:
        raise Broken("restart", f"{learner} is believed to be there")
    for name in saved.accounts:
      for p in range(len(saved.fragments)):
        old = status.account_totals(saved, name, p)
        new = status.account_totals(state, name, p)
        if (old.reported, old.merged) != (new.reported, new.merged):
          raise Broken("restart", f"books of {name}, {p}: {old} -> {new}")
    for merged, fragment in zip(self._batches, state.fragments):
      lost = [b for b, (n, _) in merged.items() if n > fragment.version.n]
      for batch in lost:
        del merged[batch]
    if state.rounds or state.carried or state.accepted != saved.accepted:
      raise Broken("restart", f"{state.rounds} {state.carried}")
    self._begin_epoch(state)
    self._live(state, state)
    for name, p in self._totals:
      self._balance(state, name, p)

  # --- what was said, and what was decided ------------------------------------------

  def _note_said(self, learner: Learner, counts: tuple[Counts, ...]) -> None:
    for p, (steps, _) in enumerate(counts):
      total, last = self._said.get((learner.learner, p), (0, 0))
      if learner.bases[p] is not None and steps > last:
        self._said[learner.learner, p] = (total + steps - last, steps)

  def _answered(self, event: Event, effects: tuple[Effect, ...]) -> None:
    """Each reply gets one answer, and nothing else gets one."""
    answers = [e for e in effects if type(e) is events.Resolved]
    if not isinstance(event, events.Replied):
      if answers:
        raise Broken("resolved once", f"{event} is answered: {answers}")
      return
    if len(answers) != 1 or answers[0].key != _key(event):
      raise Broken("resolved once", f"{event}: {answers}")

  def _obeyed(
    self, before: State, event: Event, after: State, effect: Effect
  ) -> None:
    """Books one effect, if it may be."""
    if not (effect.reason or isinstance(effect, events.SnapshotOver)):
      raise Broken("every decision says why", f"{effect}")
    if self.reached:
      self.reached.note(effect)
    match effect:
      case events.Resolved():
        assert isinstance(event, events.Replied)
        self._resolved(before, event, after, effect)
      case events.Pull():
        self._pull(event, after, effect)
      case events.Free():
        if self._buffers.pop(effect.key, None) is None:
          raise Broken("buffers", f"freed, and not held: {effect}")
      case events.Merge():
        self._merge(after, effect)
      case events.Publish():
        self._published(event, after, effect)
      case events.Welcome():
        self._over.pop(effect.learner, None)
        self._evicted.discard(effect.learner)
        self._welcome(before, after, effect)
      case events.Fence():
        self._over[effect.learner] = after.learners[effect.learner].heard_at
      case events.GiveUp():
        open_ = {(r.fragment, r.round, r.attempt) for r in after.rounds}
        if (effect.fragment, effect.round, effect.attempt) in open_:
          raise Broken("rounds", f"given up, and open: {effect}")
      case events.Shards():
        # What is told may be fenced in the same step.
        told = (
          before.learners.get(effect.learner),
          after.learners[effect.learner],
        )
        if not any(
          m and m.incarnation == effect.incarnation and m.takes_shards
          for m in told
        ):
          raise Broken("shards", f"{effect}: {told}")
      case events.Marker():
        self._marker(after, effect)
      case events.SnapshotOver():
        self._cut_over(effect)
      case events.Finished():
        again = isinstance(event, events.Joined) and _is_over(before)
        if (self._num_ended and not again) or self._buffers:
          raise Broken("the end", f"{effect}: {self._buffers}")
        self._num_ended += 1

  def _resolved(
    self,
    before: State,
    event: events.Replied,
    after: State,
    effect: events.Resolved,
  ) -> None:
    key, outcome = effect.key, effect.outcome
    first = self._answers.get(key)
    if outcome is Outcome.DUPLICATE:
      if first is None or first is not effect.first:
        raise Broken("resolved once", f"{effect}: was told {first}")
      return
    if outcome not in _TAKEN:
      # Its shard may be lent in the same step.
      if None in (_speaker(before, event), _speaker(after, event)):
        return  # Whoever is over is told that it is over.
      if _is_over(before):
        return
      if first not in (None, outcome) and self._is_remembered(key):
        raise Broken("resolved once", f"{effect}: was told {first}")
      asked = key in self._pulled or outcome is Outcome.LATE
      if first is None and asked:
        self._answer(key, outcome)
      return
    if first is not None:
      raise Broken("resolved once", f"{effect}: was told {first}")
    if _speaker(before, event) is None:
      raise Broken("fence", f"taken from a process that is over: {effect}")
    if key not in self._pulled or not math.isfinite(event.norm):
      raise Broken("answers pulls", f"{effect}: {event}")
    self._check_base(before, event)
    self._answer(key, outcome)
    self._buffers[key] = _Taken(event, outcome is Outcome.CARRIED)

  def _answer(self, key: ReplyKey, outcome: Outcome) -> None:
    self._answers[key] = outcome
    where = key.learner, key.fragment
    self._newest[where] = (*self._newest.get(where, ())[-1:], key)

  def _is_remembered(self, key: ReplyKey) -> bool:
    """Outcomes are, for the last two rounds of a fragment."""
    return key in self._newest.get((key.learner, key.fragment), ())

  def _check_base(self, state: State, event: events.Replied) -> None:
    p, base = event.fragment, event.base
    if not _is_of_history(state, p, base):
      raise Broken("bases", f"{event} from no version of this history")
    stale = state.fragments[p].version.n - base.n
    if stale > (
      0 if state.rules.stale == "reject" else state.rules.max_staleness
    ):
      raise Broken("bases", f"{event} is {stale} versions old")
    if base.n < self._merged_n.get((event.learner, p), 0):
      raise Broken("one base, one merge", f"{event} is taken")

  def _pull(self, event: Event, after: State, pull: events.Pull) -> None:
    key = ReplyKey(
      pull.learner, pull.incarnation, pull.fragment, pull.round, pull.attempt
    )
    learner = after.learners[pull.learner]
    p = pull.fragment
    if learner.incarnation != pull.incarnation or learner.gone:
      raise Broken("pulls", f"{pull}: {learner}")
    if key in self._pulled:
      again = isinstance(event, events.Joined)
      if not again or event.learner != pull.learner or key in self._answers:
        raise Broken("pulls", f"sent before: {pull}")
      return
    if self._cut and not self._is_held(after, self._cut):
      raise Broken("cuts", f"{pull} while {self._cut} is not held by all")
    self._pulled.add(key)
    if len(learner.asked) > learner.max_replies:
      raise Broken("pulls", f"{learner.asked} of {learner.max_replies}")
    base = learner.bases[p]
    able = learner.live and learner.connected and base is not None
    if after.end is None:
      able = able and learner.training
    if not able or learner.counts[p].steps < 1:
      raise Broken("members", f"{pull}: {learner}")
    if base is not None and base.n < self._merged_n.get((key.learner, p), 0):
      raise Broken("members", f"{pull} of base {base}, merged before")
    rules = after.rules
    reported = learner.reported_t >= after.t - 1
    waits = rules.wait_for_publication or after.end is not None
    if rules.members == "reported" and not (waits or reported):
      raise Broken("members", f"{pull}: {learner} has not reported since")

  def _marker(self, after: State, marker: events.Marker) -> None:
    live = {
      (m.learner, m.incarnation) for m in after.learners.values() if m.live
    }
    is_newest = marker.clock == tuple(self._versions)
    if self._cut or set(marker.members) != live or not is_newest:
      raise Broken("cuts", f"{marker}: {self._cut}, {live}, {self._versions}")
    self._cut, self._copied = marker, False
    self._awaited, self._marked_at, self._in_cut = live, after.now, set()
    self._away = {
      name for name, m in after.learners.items() if self._is_missed(after, m)
    }

  def _is_missed(self, after: State, learner: Learner) -> bool:
    """Whether it gets no marker, and may be back: so the cut names it."""
    name, lease_s = learner.learner, after.rules.lease_s
    if learner.live or name in self._evicted:
      return False
    return self._over.get(name, math.inf) + lease_s > after.now

  def _skip(self, before: State, event: Event, after: State) -> None:
    """Who has spoken, is lost, or takes longer than a lease, holds none up."""
    if isinstance(event, events.MarkerDone):
      self._saved(before, _speaker(before, event), event)
    late = after.now >= self._marked_at + after.rules.lease_s
    members = (after.learners[name] for name, _ in self._awaited)
    here = {(m.learner, m.incarnation) for m in members if m.live and not late}
    self._awaited &= here

  def _saved(
    self, before: State, old: Learner | None, event: events.MarkerDone
  ) -> None:
    if old and self._cut and self._cut.snapshot == event.snapshot:
      self._awaited -= {(old.learner, old.incarnation)}
      if _holds(before, old, self._cut):
        self._in_cut.add(old.learner)

  def _is_held(self, after: State, cut: events.Marker) -> bool:
    """Whether nothing newer can get into a cut any more."""
    return self._copied and all(
      _holds(after, after.learners[name], cut) for name, _ in self._awaited
    )

  def _captured(self, event: events.Captured) -> None:
    if self._cut is None or self._cut.snapshot != event.snapshot:
      return
    if not self._copied and list(self._cut.clock) != self._versions:
      raise Broken("cuts", f"{self._versions} are copied for {self._cut}")
    self._copied = True

  def _cut_over(self, effect: events.SnapshotOver) -> None:
    cut, self._cut = self._cut, None
    taken = not effect.reason
    names = {name for name, _ in cut.members} | self._away if cut else set()
    told = [*effect.learners, *(s.split(":")[0] for s in effect.skipped)]
    if taken and (not cut or not effect.path or sorted(told) != sorted(names)):
      raise Broken("cuts", f"{effect} of {cut}")
    if taken and not self._in_cut.issuperset(effect.learners):
      raise Broken("who is in a cut", f"{effect}: {self._in_cut} held {cut}")
    if cut and effect.snapshot not in (0, cut.snapshot):
      raise Broken("cuts", f"{effect} of {cut}")
    if effect.snapshot == 0:
      self._cut = cut

  def _merge(self, after: State, merge: events.Merge) -> None:
    p, rules = merge.fragment, after.rules
    r = _round_of(after, p)
    if r is None or not r.merging or p in self._merging:
      raise Broken("rounds", f"{merge}: {r}")
    if merge.version != (after.epoch, self._versions[p].n + 1):
      raise Broken("contiguous versions", f"{merge}: {self._versions[p]}")
    needed = r.quorum if r.flush or rules.wait_for_publication else rules.quorum
    if len(merge.inputs) < needed or not any(w > 0 for _, w in merge.inputs):
      raise Broken("quorum", f"{merge} needs {needed}")
    self._merging[p] = {}
    for key, weight in merge.inputs:
      taken = self._buffers.pop(key, None)
      if taken is None:
        raise Broken("buffers", f"merged, and not held: {key}")
      self._merging[p][key] = taken.reply.counts
      steps, tokens = taken.reply.counts
      expected = tokens * (tokens / steps) if steps and tokens else 0.0
      if not math.isclose(weight, expected):
        raise Broken("weights", f"{key} weighs {weight}, not {expected}")
      if taken.reply.base.n < self._merged_n.get((key.learner, p), 0):
        raise Broken("one base, one merge", f"{taken.reply} in {merge}")
      if not taken.carried and (key.learner, key.incarnation) not in r.members:
        raise Broken("members", f"{key} in {merge}: {r.members}")
    if len({key.learner for key, _ in merge.inputs}) < len(merge.inputs):
      raise Broken("one base, one merge", f"{merge} has a learner twice")

  def _versions_moved(
    self, before: State, event: events.Merged, after: State
  ) -> dict[ReplyKey, Counts]:
    """The replies that this event has merged; none if it was foreign."""
    p = event.fragment
    was, now = self._versions[p], after.fragments[p].version
    self._versions[p] = now
    self._versions_stand(before, after)
    if now == was:
      return {}
    if now != (after.epoch, was.n + 1) or event.version != now:
      raise Broken("contiguous versions", f"{event}: {was} -> {now}")
    if p not in self._merging:
      raise Broken("contiguous versions", f"{event}: nothing was to be merged")
    merged = self._merging.pop(p)
    for key in merged:
      self._merged_n[key.learner, p] = now.n
      if self.is_trusted(key.learner):
        self._trained_once(p, now.n, key)
    return merged

  def _trained_once(self, p: int, n: int, key: ReplyKey) -> None:
    for batch in self._covered.get(key, ()):
      earlier = self._batches[p].get(batch)
      if earlier:
        text = f"{batch} of fragment {p} in {earlier} and in {n, key}"
        raise Broken("one batch, one merge", text)
      self._batches[p][batch] = n, key

  def _versions_stand(self, before: State, after: State) -> None:
    if before.fragments is after.fragments:
      return
    for p, fragment in enumerate(after.fragments):
      if fragment.version != self._versions[p]:
        raise Broken("contiguous versions", f"{p}: {fragment.version}")

  def _published(
    self, event: Event, after: State, effect: events.Publish
  ) -> None:
    p = effect.fragment
    if effect.version != after.fragments[p].version:
      raise Broken("published to all", f"{effect} is not the newest")
    told = [(r.learner, r.incarnation) for r in effect.receivers]
    for name, incarnation in told:
      m = after.learners[name]
      if m.incarnation != incarnation or not (m.live or m.connected):
        raise Broken("published to all", f"{effect}: {m}")
    there = [
      (m.learner, m.incarnation) for m in after.learners.values() if m.connected
    ]
    if not isinstance(event, events.Merged) or effect.exact:
      return
    if p == event.fragment and sorted(told) != sorted(there):
      raise Broken("published to all", f"{effect}: {there}")
    for receiver in effect.receivers:
      number = receiver.round, receiver.attempt
      key = ReplyKey(receiver.learner, receiver.incarnation, p, *number)
      included = (
        self._merged_n.get((receiver.learner, p)) == effect.version.n
        and key in self._answers
      )
      if (receiver.outcome is Outcome.INCLUDED) != included and (
        receiver.outcome is Outcome.INCLUDED or receiver.round >= 0
      ):
        raise Broken("published to all", f"{receiver} in {effect}")

  def _welcome(
    self, before: State, after: State, effect: events.Welcome
  ) -> None:
    if not effect.reconnect:
      if effect.incarnation <= self._last_incarnation:
        raise Broken("incarnations", f"{effect}")
      self._last_incarnation = effect.incarnation
      for p in range(len(effect.clocks)):
        total, _ = self._said.get((effect.learner, p), (0, 0))
        self._said[effect.learner, p] = (total, 0)
    for p, clock in enumerate(effect.clocks):
      expected = after.fragments[p].version, after.starts[-1][p]
      if (clock.version, clock.n0) != expected:
        raise Broken("restart", f"{effect}: clock {p} is not {expected}")
      if clock.merged_n != self._merged_n.get((effect.learner, p), 0):
        raise Broken("restart", f"{effect}: merged_n of {p}")
    donor = effect.donor and after.learners[effect.donor.learner]
    if donor and not (
      donor.live
      and donor.training
      and donor.state_address
      and donor.learner != effect.learner
    ):
      raise Broken("donors", f"{effect}: {donor}")

  # --- the state ----------------------------------------------------------------

  def _books(
    self,
    before: State,
    event: Event,
    after: State,
    merged: dict[ReplyKey, Counts],
  ) -> None:
    """The law of the ledger, for every account that may have changed."""
    for name, learner in after.learners.items():
      row = after.accounts[name]
      old = before.learners.get(name)
      if (
        old is not None
        and before.accounts[name] is row
        and (
          old is learner
          or (old.counts is learner.counts and old.bases is learner.bases)
        )
      ):
        continue
      for p in range(len(row)):
        self._account(before, event, after, name, p, merged)

  def _account(
    self,
    before: State,
    event: Event,
    after: State,
    name: str,
    p: int,
    merged: dict[ReplyKey, Counts],
  ) -> None:
    was = self._totals.get((name, p))
    now = self._balance(after, name, p)
    done = ZERO
    for key, counts in merged.items():
      if key.learner == name and key.fragment == p:
        done = ledger.plus(done, counts)
    if was is not None:
      if ledger.plus(was.merged, done) != now.merged:
        raise Broken("counted once", f"{name}, {p}: {was} -> {now}, {merged}")
      if now.reported < was.reported or now.reported[1] < was.reported[1]:
        raise Broken("ledger", f"{name}, {p}: {was} -> {now}")
    if _has_adopted(before, event, after, name, p):
      total, _ = self._said.get((name, p), (0, 0))
      self._said[name, p] = (total, 0)
    total, _ = self._said.get((name, p), (0, 0))
    if now.reported.steps < total and self.is_trusted(name):
      text = f"{name}, {p}: {now}, but {total} steps were reported"
      raise Broken("nothing said is lost", text)

  def _balance(self, state: State, name: str, p: int) -> ledger.Totals:
    now = status.account_totals(state, name, p)
    lost_steps = lost_tokens = 0
    for _, (steps, tokens) in now.discarded:
      lost_steps, lost_tokens = lost_steps + steps, lost_tokens + tokens
      if steps < 0 or tokens < 0:
        raise Broken("ledger", f"{name}, {p}: {now}")
    done, rest = now.merged, now.pending
    if (
      now.reported[0] != done[0] + rest[0] + lost_steps
      or now.reported[1] != done[1] + rest[1] + lost_tokens
      or min(*done, *rest) < 0
      or done[0] > now.reported[0]
      or done[1] > now.reported[1]
    ):
      raise Broken("ledger", f"{name}, {p}: {now}")
    self._totals[name, p] = now
    return now

  def _buffered(self, after: State) -> None:
    held = [c.key for c in after.carried]
    for r in after.rounds:
      if not r.merging:
        held += [reply.key for reply in r.replies]
    if len(held) != len(self._buffers) or any(
      key not in self._buffers for key in held
    ):
      text = f"the state holds {held}, {list(self._buffers)} were taken"
      raise Broken("buffers", text)

  def _fenced(self, before: State, event: Event, after: State) -> None:
    """The words of a process that is over change nothing of the new one."""
    if not isinstance(event, LearnerEvent):
      return
    old = before.learners.get(event.learner)
    if old is None or _speaker(before, event) is not None:
      return
    new = after.learners[event.learner]
    if new is old:
      return
    if (new.heard_at, new.step, new.counts, new.bases, new.incarnation) != (
      old.heard_at,
      old.step,
      old.counts,
      old.bases,
      old.incarnation,
    ) or new.live > old.live:
      raise Broken("fence", f"{event} changed {old} to {new}")

  def _paced(self, before: State, after: State) -> None:
    moved = after.t - before.t
    if not moved:
      return
    rules = after.rules
    if moved < 0 or before.end is not None:
      raise Broken("pace", f"t {before.t} -> {after.t}")
    if rules.wait_for_publication or rules.max_ahead:
      steps = sorted(m.step for m in after.learners.values() if m.live)
      if steps[-rules.quorum] < after.t:
        raise Broken("pace", f"t is {after.t} at steps {steps}")
    elif moved > 1 or len(self._stepped) < rules.quorum:
      raise Broken("pace", f"t {before.t} -> {after.t}: {self._stepped}")
    elif before.step_s is not None and after.now < before.t_due:
      raise Broken("pace", f"t advances at {after.now} before {before.t_due}")
    self._stepped.clear()

  def _rounds(self, after: State) -> None:
    fragments = [r.fragment for r in after.rounds]
    due = [d.fragment for d in after.queue]
    if len(set(fragments)) < len(fragments) or len(set(due)) < len(due):
      raise Broken("rounds", f"{after.rounds} {after.queue}")
    if len(fragments) > after.rules.max_open_rounds:
      raise Broken("rounds", f"{len(fragments)} are open: {after.rounds}")
    for r in after.rounds:
      if not set(r.waiting) <= set(r.members):
        raise Broken("members", f"{r}")
      if r.merging and r.fragment not in self._merging:
        raise Broken("rounds", f"merging, and never told: {r}")
      for name, incarnation in r.waiting:
        learner = after.learners[name]
        number = r.fragment, r.round, r.attempt
        if learner.incarnation != incarnation or not any(
          a[:3] == number and not a.carried for a in learner.asked
        ):
          raise Broken("under way", f"{r} waits for {learner}")

  def _live(self, before: State, after: State) -> None:
    live = training = pacing = exhausted = 0
    now, lease_s = after.now, after.rules.lease_s
    for name, m in after.learners.items():
      if m.live:
        live += 1
        training += m.training
        pacing += m.training and not m.exhausted
        exhausted += m.exhausted
        if m.gone or (m.heard_at + lease_s <= now and not _is_over(after)):
          raise Broken("liveness", f"{m} at {now}")
      if m.asked and before.learners.get(name) is not m:
        self._under_way(after, m)
    counted = live, training, pacing, exhausted
    cached = (
      after.num_live,
      after.num_training,
      after.num_pacing,
      after.num_exhausted,
    )
    if counted != cached:
      raise Broken("liveness", f"{counted}, cached {cached}")

  def _shards(self, after: State) -> None:
    owned, read = [], []
    for m in after.learners.values():
      owned += m.shards
      read += m.reads
      if m.gone and m.reads:
        raise Broken("shards", f"{m} is over and reads")
    for shards in (owned, read):
      if len(set(shards)) < len(shards):
        raise Broken("shards", f"one is held twice: {after.learners}")

  def _under_way(self, after: State, learner: Learner) -> None:
    if not learner.live:
      raise Broken("under way", f"{learner} is asked and not live")
    for asked in learner.asked:
      if asked.carried:
        if after.carried_check_at is None:
          raise Broken("under way", f"nobody watches {asked} of {learner}")
        continue
      r = _round_of(after, asked.fragment)
      member = learner.learner, learner.incarnation
      if r is None or r.round != asked.round or member not in r.waiting:
        raise Broken("under way", f"{asked} of {learner}: {r}")

  def _time(self, before: State, after: State) -> None:
    at = machine.next_timer(after)
    if at is not None and at <= after.now:
      raise Broken("timers", f"{at} at {after.now}")
    if at is None and any(not r.merging for r in after.rounds):
      raise Broken("timers", f"none for {after.rounds}")
    if before.accepted is not after.accepted:
      for shard, batch in before.accepted.items():
        if after.accepted[shard] < batch:
          raise Broken("accepted positions", f"{shard}: {after.accepted}")
    if before.end is not None and (
      after.end is None or after.end.cause != before.end.cause
    ):
      raise Broken("the end", f"{before.end} -> {after.end}")

  def sampled(self, state: State) -> None:
    """What is too expensive to be checked after each event."""
    try:
      status.status(state, state.now)
    except Exception as error:
      raise Broken("status", repr(error)) from error
    for name, row in state.accounts.items():
      for p in range(len(row)):
        self._balance(state, name, p)

  def invented(self, state: State, trained: dict[str, list[int]]) -> None:
    """No honest learner's books have more steps than it took."""
    for name, row in state.accounts.items():
      if not self.is_trusted(name):
        continue
      for p in range(len(row)):
        reported = status.account_totals(state, name, p).reported
        if reported.steps > trained[name][p]:
          text = f"{name}, {p}: {reported}, {trained[name][p]} steps taken"
          raise Broken("nothing is invented", text)

  def booked(self, state: State, name: str, trained: list[int]) -> None:
    """An honest learner's books have every step that it took."""
    if not self.is_trusted(name):
      return
    for p, steps in enumerate(trained):
      reported = status.account_totals(state, name, p).reported
      if reported.steps != steps:
        text = f"{name}, {p}: {reported}, {steps} steps taken"
        raise Broken("every step is booked", text)

  def finished(self, state: State) -> None:
    """The books of a run that is over are closed."""
    for name, row in state.accounts.items():
      for p in range(len(row)):
        if status.account_totals(state, name, p).pending != ZERO:
          raise Broken("the end", f"{name}, {p} has pending steps")
    if self._buffers or state.rounds or machine.next_timer(state) is not None:
      raise Broken("the end", f"{self._buffers} {state.rounds}")


def _key(event: events.Replied) -> ReplyKey:
  return ReplyKey(
    event.learner, event.incarnation, event.fragment, event.round, event.attempt
  )


def _has_adopted(
  before: State, event: Event, after: State, name: str, p: int
) -> bool:
  """Whether the counts of a fragment have started again."""
  if isinstance(event, events.Applied):
    mine = event.learner == name and event.fragment == p
    return mine and after.learners[name].counts[p] == ZERO
  if not isinstance(event, events.Joined) or name not in before.learners:
    return False
  return before.learners[name].bases[p] != after.learners[name].bases[p]


def _is_over(state: State) -> bool:
  return state.end is not None and state.end.finished


def _is_of_history(state: State, p: int, base: Version) -> bool:
  """Whether a base has the bytes that its version has in this history."""
  # A base of an epoch is valid up to where each later epoch started.
  n = [state.fragments[p].version.n] if base.epoch == state.epoch else []
  n += [start[p] for start in state.starts[base.epoch :]]
  return bool(n) and 0 <= base.n <= min(n) and base.epoch <= state.epoch


def _holds(state: State, learner: Learner, cut: events.Marker) -> bool:
  """Whether a learner has said that it trains from a cut's clock, or later."""
  return all(
    base is not None and base.n >= v.n and _is_of_history(state, p, base)
    for p, (base, v) in enumerate(zip(learner.bases, cut.clock))
  )


def _round_of(state: State, p: int) -> Round | None:
  return next((r for r in state.rounds if r.fragment == p), None)


def _speaker(state: State, event: Event) -> Learner | None:
  """The current process that an event came from."""
  if not isinstance(event, LearnerEvent):
    return None
  learner = state.learners.get(event.learner)
  if learner is None or learner.gone:
    return None
  return learner if learner.incarnation == event.incarnation else None
