"""Faults planted into the machine, to see that the exploration finds them.

Each replaces one function for as long as it is planted; the package is never
written.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ddiloco_jax.protocol import (
  events,
  guards,
  ledger,
  machine,
  members,
  membership,
  publishing,
  quorum,
  replies,
  rounds,
  shards,
  snapshots,
  turn,
)
from ddiloco_jax.protocol.events import Version


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
  """Plants the fault of this name.

  Raises:
    ValueError: There is no such fault.
  """
  if name not in PLANTS:
    raise ValueError(f"no plant {name!r}: choose from {', '.join(PLANTS)}")
  owner, attribute, make = PLANTS[name]
  whole = getattr(owner, attribute)
  setattr(owner, attribute, make(whole))
  try:
    yield
  finally:
    setattr(owner, attribute, whole)


def _no_incarnation_check(whole: Callable[..., Any]) -> Callable[..., Any]:
  def speaker(self, event):
    learner = self.learners.get(event.learner)
    return None if learner is None or learner.gone else learner

  return speaker


def _double_merge(whole: Callable[..., Any]) -> Callable[..., Any]:
  """A learner is asked, and taken, from a base that was merged already."""

  def has_progress(turn, learner, p):
    base = learner.bases[p]
    return base is not None and learner.counts[p].steps >= 1

  return has_progress


def _lost_booking(whole: Callable[..., Any]) -> Callable[..., Any]:
  """An adoption forgets the steps that no reply covers."""

  def close(account, incarnation, current, counts, before, rest):
    if rest == ledger.OVERWRITTEN:
      counts = events.ZERO
    return whole(account, incarnation, current, counts, before, rest)

  return close


def _small_quorum(whole: Callable[..., Any]) -> Callable[..., Any]:
  def quorum_of(turn, due, able):
    needed = whole(turn, due, able)
    return needed and max(1, needed - 1)

  return quorum_of


def _skipped_version(whole: Callable[..., Any]) -> Callable[..., Any]:
  def restore(rules, values, epoch=None):
    state = whole(rules, values, epoch)
    first = state.fragments[0]
    version = Version(first.version.epoch, first.version.n + 1)
    rest = state.fragments[1:]
    return state._replace(fragments=(first._replace(version=version), *rest))

  return restore


def _carried_twice(whole: Callable[..., Any]) -> Callable[..., Any]:
  """A carried reply enters a round, and stays for the next one."""

  def take_carried(turn, fragment):
    carried = turn.carried
    whole(turn, fragment)
    turn.carried = carried

  return take_carried


def _no_finite_check(whole: Callable[..., Any]) -> Callable[..., Any]:
  def fault_of(turn, event):
    fault = whole(turn, event)
    return None if fault and fault[0] == "not_finite" else fault

  return fault_of


def _flat_weight(whole: Callable[..., Any]) -> Callable[..., Any]:
  return lambda counts: float(counts.tokens)


def _deaf_publication(whole: Callable[..., Any]) -> Callable[..., Any]:
  """Only the contributors are told of a version."""

  def publish(turn, r, version):
    asked = {member.learner for member in r.members}
    all_ = turn.learners
    turn.learners = {n: m for n, m in all_.items() if n in asked}
    whole(turn, r, version)
    turn.learners = all_

  return publish


def _leaked_pull(whole: Callable[..., Any]) -> Callable[..., Any]:
  """A round is given up, and its members stay asked for ever."""
  return lambda turn, r: None


def _lost_base_in_cut(whole: Callable[..., Any]) -> Callable[..., Any]:
  """A version that was rolled back counts as the one of its number."""

  def trains_from(turn, member, clock):
    process = turn.learners[member.learner]
    return process.incarnation == member.incarnation and all(
      base is not None and base.n >= v.n
      for base, v in zip(process.bases, clock)
    )

  return trains_from


def _forgotten_away(whole: Callable[..., Any]) -> Callable[..., Any]:
  """A cut does not name who was away when the markers were sent."""
  return lambda turn: ()


def _read_again(whole: Callable[..., Any]) -> Callable[..., Any]:
  """What a reader has begun, and given back, is read by the next one, too."""

  def given_back(turn, reader, shard, batch):
    whole(turn, reader, shard, 0)

  return given_back


def _lost_adoption(whole: Callable[..., Any]) -> Callable[..., Any]:
  """Who comes back from another base is taken at that, and no more asked."""
  return lambda learner, adoptions: []


PLANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
  "no_incarnation_check": (turn.Turn, "speaker", _no_incarnation_check),
  "double_merge": (members, "has_progress", _double_merge),
  "lost_booking": (ledger, "close", _lost_booking),
  "small_quorum": (members, "quorum_of", _small_quorum),
  "skipped_version": (machine, "restore", _skipped_version),
  "carried_twice": (replies, "take_carried", _carried_twice),
  "no_finite_check": (guards, "fault_of", _no_finite_check),
  "flat_weight": (quorum, "weight", _flat_weight),
  "deaf_publication": (publishing, "publish", _deaf_publication),
  "leaked_pull": (rounds, "_dismiss", _leaked_pull),
  "read_again": (shards, "_given_back", _read_again),
  "lost_base_in_cut": (snapshots, "_trains_from", _lost_base_in_cut),
  "lost_adoption": (membership, "unknown_adoptions", _lost_adoption),
  "forgotten_away": (snapshots, "_away", _forgotten_away),
}
