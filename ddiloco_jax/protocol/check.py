"""What no honest learner can say; the service refuses it before the machine.

The machine itself never raises, whatever the order of events: these are
faults of one message. (INVALID_ARGUMENT in the table of the service.)
"""

import math
from collections.abc import Sequence

from ddiloco_jax.protocol import events, membership, possible
from ddiloco_jax.protocol.events import Counts, Version
from ddiloco_jax.protocol.state import Learner, State

# Beyond it a float64 cannot hold a count exactly, and nobody trains so long.
MAX_COUNT = 2**53
# No batch of one step is so large: beyond it, a step's weight is an invention.
MAX_STEP_TOKENS = 2**32
MAX_SHOWN = 8  # Names in a text.


def check(state: State, event: events.Event) -> None:
  """Refuses an event that cannot be true, given what its process said before.

  Raises:
    ValueError: The value, the rule and the fix.
  """
  match event:
    case events.Joined():
      _joined(state, event)
    case events.Reported():
      _reported(state, event)
    case events.Recovered():
      _recovered(event)
    case events.Applied():
      _applied(state, event)
      if old := _process(state, event):
        possible.check_applied(old, event)
    case events.Pushing() | events.PushBroken():
      _fragment(state, event.fragment)
      _count(event.round, "push: round")
      _count(event.attempt, "push: attempt")
    case events.Replied():
      _replied(state, event)
    case events.EvictRequested():
      _evicted(state, event.learner)
    case _:
      pass


def _evicted(state: State, name: str) -> None:
  if state.end is not None and state.end.finished:
    raise ValueError(
      f"learner {name!r} is to be evicted and the run has finished "
      f"({state.end.reason}): nobody is in it any more. Evict while it runs, or "
      "after it was started again"
    )
  learner = state.learners.get(name)
  if learner is None or membership.is_fenced(learner, learner.nonce):
    here = sorted(
      m.learner
      for m in state.learners.values()
      if not membership.is_fenced(m, m.nonce)
    )
    shown = ", ".join(here[:MAX_SHOWN]) or "nobody, as none is here"
    more = len(here) - MAX_SHOWN
    raise ValueError(
      f"learner {name!r} is to be evicted and has no process in this run: name "
      f"one of {shown}{f' and {more} more' if more > 0 else ''}"
    )


def _joined(state: State, event: events.Joined) -> None:
  if not event.learner or not event.nonce:
    raise ValueError(
      f"hello has learner id {event.learner!r} and nonce {event.nonce!r}: "
      "neither may be empty; name the learner, and draw a nonce per process"
    )
  num = state.rules.num_fragments
  if len(event.bases) not in (0, num):
    raise ValueError(
      f"hello of {event.learner!r} has {len(event.bases)} bases for {num} "
      "fragments: send one per fragment, or none"
    )
  _adoptions(state, event)
  for rows in (event.returned, [(shard, 0) for shard in event.reads]):
    _once(rows, "data shard", f"hello of {event.learner!r}")
  for p, base in enumerate(event.bases):
    if base.n < 0 or base.epoch < 0 or base.epoch > state.epoch:
      raise ValueError(
        f"hello of {event.learner!r}: base {base.n} of epoch {base.epoch} of "
        f"fragment {p} cannot be; this is epoch {state.epoch}: send the "
        "version that was fetched"
      )


def _adoptions(state: State, event: events.Joined) -> None:
  who, most = f"hello of {event.learner!r}", events.MAX_ADOPTIONS
  last: dict[int, Version] = {}
  nums: dict[int, int] = {}
  for adoption in event.adoptions:
    _applied(state, adoption)
    p = adoption.fragment
    last[p], nums[p] = adoption.version, nums.get(p, 0) + 1
    if nums[p] > most:
      raise ValueError(
        f"{who} has more than {most} adoptions of fragment {p}: name the last"
        f" {most}, oldest first"
      )
  for p, base in enumerate(event.bases):
    if last.get(p, base) != base:
      raise ValueError(
        f"{who}: base {base.n} of epoch {base.epoch} of fragment {p}, and its "
        f"last adoption is of {last[p].n} of epoch {last[p].epoch}: name both "
        "as of one moment"
      )
  old = state.learners.get(event.learner)
  if old is not None and old.nonce in (event.nonce, event.resumes):
    possible.check_adoptions(old, event, who)


def _applied(state: State, event: events.Applied | events.Adoption) -> None:
  _fragment(state, event.fragment)
  _counts(event.counts, f"applied fragment {event.fragment}")
  _count(event.step, "applied: step")
  _published(state, event.fragment, event.version)


def _recovered(event: events.Recovered) -> None:
  if event.source not in events.RECOVERY_SOURCES:
    raise ValueError(
      f"recovered of {event.learner!r} has the source {event.source!r}: send"
      f" one of {', '.join(events.RECOVERY_SOURCES)}"
    )


def _reported(state: State, event: events.Reported) -> None:
  num = state.rules.num_fragments
  who = f"report of {event.learner!r}"
  if len(event.counts) != num:
    raise ValueError(
      f"{who} has counts for {len(event.counts)} fragments and the run has "
      f"{num}: send one per fragment"
    )
  for p, counts in enumerate(event.counts):
    _counts(counts, f"{who}, fragment {p}")
  _count(event.step, f"{who}: step")
  for rows in (event.positions, event.returned):
    _once(rows, "data shard", who)
    for shard, batch in rows:
      _shard(state, shard, batch, who)
  _once(event.boundaries, "the boundary of fragment", who)
  for p, step in event.boundaries:
    _fragment(state, p)
    _count(step, f"{who}: boundary")
  for name, value in event.metrics:
    if not isinstance(value, int | float):
      raise ValueError(f"{who}: metric {name} is {value!r}; send a number")
  old = _process(state, event)
  if old is None:
    return
  if event.step < old.step:
    raise ValueError(
      f"{who}: step {event.step} after {old.step}: steps of a process never "
      "go back; a process that starts over joins with a new nonce"
    )
  for p, (counts, before) in enumerate(zip(event.counts, old.counts)):
    if counts[0] < before[0] or counts[1] < before[1]:
      raise ValueError(
        f"{who}: {counts.steps} steps, {counts.tokens} tokens of fragment {p} "
        f"after {before.steps}, {before.tokens} from the same base: counts "
        "only grow until an adoption; send Applied before they start again"
      )
  possible.check_report(state, old, event)


def _process(state: State, event: events.LearnerEvent) -> Learner | None:
  learner = state.learners.get(event.learner)
  if learner is None or learner.gone:
    return None
  return learner if learner.incarnation == event.incarnation else None


def _replied(state: State, event: events.Replied) -> None:
  who = f"reply of {event.learner!r}, fragment {event.fragment}"
  _fragment(state, event.fragment)
  _count(event.round, f"{who}: round")
  _count(event.attempt, f"{who}: attempt")
  _counts(event.counts, who)
  if event.base.n < 0 or event.base.epoch < 0:
    raise ValueError(
      f"{who}: base {event.base.n} of epoch {event.base.epoch} is negative; "
      "send the version that the delta is taken against"
    )
  if event.norm < 0:
    raise ValueError(f"{who}: norm {event.norm} is negative")
  if not math.isfinite(event.lr_sum) or event.lr_sum < 0:
    raise ValueError(
      f"{who}: lr_sum is {event.lr_sum}; send the sum of the inner learning "
      "rate over the covered steps, or 0 if it is not known"
    )
  _once(event.positions, "data shard", who)
  for shard, batch in event.positions:
    _shard(state, shard, batch, who)


def _once(rows: Sequence[tuple[int, int]], what: str, who: str) -> None:
  """So none has more of them than the run has."""
  seen: set[int] = set()
  for number, _ in rows:
    if number in seen:
      raise ValueError(f"{who}: {what} {number} twice; say each once")
    seen.add(number)


def _published(state: State, p: int, version: Version) -> None:
  newest = state.fragments[p].version
  # One of an earlier epoch may have been published, and rolled back since.
  earlier = 1 <= version.epoch < state.epoch and version.n >= 0
  if not (earlier or membership.is_valid_base(state, p, version)):
    raise ValueError(
      f"applied version {version.n} of epoch {version.epoch} of fragment {p} "
      f"was never published here; the newest is {newest.n} of epoch "
      f"{newest.epoch}: fetch it"
    )


def _fragment(state: State, p: int) -> None:
  num = state.rules.num_fragments
  if not 0 <= p < num:
    raise ValueError(
      f"fragment {p} does not exist: the run has 0..{num - 1}; take the layout "
      "from GetRun"
    )


def _counts(counts: Counts, who: str) -> None:
  _count(counts[0], f"{who}: steps")
  _count(counts[1], f"{who}: tokens")
  if counts.tokens > counts.steps * MAX_STEP_TOKENS:
    raise ValueError(
      f"{who}: {counts.tokens} tokens in {counts.steps} steps: no step has more "
      "than 2**32, and none without a step; count the loss tokens of each step"
    )


def _count(value: int, who: str) -> None:
  if not 0 <= value <= MAX_COUNT:
    raise ValueError(
      f"{who} is {value}; it must lie in 0..2**53: count from the last adoption"
    )


def _shard(state: State, shard: int, batch: int, who: str) -> None:
  if not 0 <= shard < state.rules.num_shards:
    raise ValueError(
      f"{who}: data shard {shard} does not exist; there are "
      f"{state.rules.num_shards}: read the shard named in Welcome"
    )
  _count(batch, f"{who}: position in shard {shard}")
