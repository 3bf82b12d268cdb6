"""Who was here before a restart has a lease to come back, before all others."""

import dataclasses

from ddiloco_jax.protocol import events, machine
from ddiloco_jax.protocol.events import Position
from tests.protocol.by_hand import ONE, Hand, all_of, only

TWO = dataclasses.replace(
  ONE, num_shards=2, max_learners=3, lease_s=5.0, shard_lease_s=6.0
)


def restarted(hand: Hand) -> Hand:
  """The syncer is back; its learners have not called yet."""
  again = Hand(
    hand.rules, machine.restore(hand.rules, machine.save(hand.state))
  )
  for name in ("incarnations", "steps", "counts", "bases"):
    setattr(again, name, dict(getattr(hand, name)))
  return again


def with_two(rules=TWO) -> Hand:
  hand = Hand(rules)
  for name in ("L0", "L1"):
    hand.join(name, takes_shards=True)
    hand.report(name)
  return hand


def come_back(hand: Hand, name: str) -> events.Welcome:
  reads = hand.state.learners[name].reads
  effects = hand.join(
    name, bases=tuple(hand.bases[name]), takes_shards=True, reads=reads
  )
  return only(effects, events.Welcome)


def test_a_newcomer_takes_a_free_shard_and_nobody_is_fenced():
  hand = restarted(with_two(dataclasses.replace(TWO, num_shards=3)))

  effects = hand.join("L2")

  assert only(effects, events.Welcome).positions == (Position(2, 0),)
  assert come_back(hand, "L0").reconnect
  assert come_back(hand, "L1").reconnect
  assert hand.of(events.Fence) == []


def test_a_newcomer_without_a_free_shard_waits_a_lease_and_no_longer():
  hand = restarted(with_two())

  reject = only(hand.join("L2"), events.Reject)

  assert reject.code == "UNAVAILABLE"
  assert "lease of L0, L1" in reject.reason
  assert come_back(hand, "L1").reconnect
  hand.tick(TWO.lease_s)
  effects = hand.join("L2")
  assert only(effects, events.Welcome).positions == (Position(0, 0),)
  assert only(effects, events.Fence).learner == "L0"


def test_a_newcomer_takes_no_place_of_who_comes_back():
  hand = restarted(
    with_two(dataclasses.replace(TWO, max_learners=2, num_shards=3))
  )

  reject = only(hand.join("L2"), events.Reject)

  assert reject.code == "UNAVAILABLE"
  assert "2 may come back" in reject.reason
  assert come_back(hand, "L0").reconnect
  assert only(hand.join("L2"), events.Reject).code == "UNAVAILABLE"
  assert come_back(hand, "L1").reconnect
  assert only(hand.join("L2"), events.Reject).code == "RESOURCE_EXHAUSTED"


def test_an_owner_that_is_back_first_does_not_fence_its_reader():
  hand = with_two()
  for _ in range(12):  # L0 is away, and L1 reads its shard.
    hand.now += 1.0
    step = hand.steps["L1"] + 1
    hand.report("L1", positions=(Position(1, step),))
  assert hand.state.learners["L1"].reads == (1, 0)
  hand = restarted(hand)

  waits = only(hand.join("L0", "L0-1", takes_shards=True), events.Reject)

  assert waits.code == "UNAVAILABLE"
  assert come_back(hand, "L1").reconnect
  assert all_of(hand.effects, events.Fence) == []
