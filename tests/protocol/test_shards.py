"""[D1] Data shards: owned, lent, given back, and never read for two."""

import dataclasses

from ddiloco_jax.protocol import events, machine
from ddiloco_jax.protocol.events import Position
from tests.protocol.by_hand import FOUR, Hand, all_of, only

TWO = dataclasses.replace(
  FOUR, max_learners=2, num_shards=2, lease_s=5.0, shard_lease_s=20.0
)


def pair(rules=TWO, **more):
  hand = Hand(rules)
  for name in ("L0", "L1"):
    hand.join(name, takes_shards=True, **more)
  return hand


def step(hand, name, *positions, returned=(), dt=0.0):
  hand.now += dt
  return hand.report(
    name,
    positions=tuple(Position(*p) for p in positions),
    returned=tuple(Position(*p) for p in returned),
  )


def lend(hand):
  """L1 is away until its shard is lent to L0; L0 goes on alone."""
  hand.until_asked(["L0", "L1"])
  hand.reply("L1", positions=(Position(1, 1),))
  effects = []
  for i in range(2, 8):
    effects += step(hand, "L0", (0, i), dt=4.0)
  return effects


def reads(hand, name):
  return hand.state.learners[name].reads


def test_the_shard_of_a_lost_learner_is_lent_at_its_accepted_position():
  hand = pair()

  effects = lend(hand)

  told = only(effects, events.Shards)
  assert told.learner == "L0"
  assert told.positions == (Position(0, 0), Position(1, 1))
  assert only(effects, events.Fence).learner == "L1"
  assert hand.state.counters["shard_lent"] == 1


def test_nothing_is_lent_for_ever_with_0_or_to_whom_does_not_take_shards():
  never = pair(dataclasses.replace(TWO, shard_lease_s=0.0))
  foreign = Hand(TWO)
  for name in ("L0", "L1"):
    foreign.join(name)

  for hand in (never, foreign):
    assert not all_of(lend(hand), events.Shards | events.Fence)


def test_a_lent_shard_is_lent_to_who_reads_fewest():
  rules = dataclasses.replace(TWO, max_learners=3, num_shards=6)
  hand = Hand(dataclasses.replace(rules, shards_per_learner=2))
  for name in ("L0", "L1", "L2"):
    hand.join(name, takes_shards=True)
  for _ in range(8):
    for name in ("L0", "L1"):
      step(hand, name, dt=2.0)

  assert reads(hand, "L2") == ()
  assert [len(reads(hand, name)) for name in ("L0", "L1")] == [3, 3]


def test_a_learner_that_comes_back_goes_on_where_the_other_stopped():
  hand = pair()
  lend(hand)
  step(hand, "L0", (0, 8), (1, 3))

  waits = hand.join("L1", nonce="new", takes_shards=True)

  assert only(waits, events.Reject).code == "UNAVAILABLE"
  assert only(waits, events.Shards).positions == (Position(0, 0),)
  step(hand, "L0", (0, 8), (1, 4))  # It has not heard of it yet.
  assert not all_of(
    hand.join("L1", nonce="new"), events.Welcome | events.Shards
  )
  step(hand, "L0", (0, 9), returned=((1, 4),))
  welcome = only(hand.join("L1", nonce="new"), events.Welcome)
  assert welcome.positions == (Position(1, 4),)
  assert reads(hand, "L0") == (0,)
  # A reply of what was read until then is no reason to skip anything.
  hand.merged()
  hand.apply("L0")
  hand.until_asked(["L0"])
  hand.reply("L0", positions=(Position(0, 9), Position(1, 9)))
  assert hand.state.accepted[1] == 4


def test_who_has_not_begun_with_a_lent_shard_is_told_twice_in_order():
  hand = pair()
  lend(hand)

  waits = hand.join("L1", nonce="new")

  assert not all_of(waits, events.Shards)  # It may not have heard of the first.
  told = only(step(hand, "L0", (0, 8), (1, 1)), events.Shards)
  assert told.positions == (Position(0, 0),)


def test_who_keeps_a_lent_shard_is_fenced_in_the_end():
  hand = pair()
  lend(hand)
  step(hand, "L0", (0, 8), (1, 3))
  hand.join("L1", nonce="new")

  effects = []
  for i in range(9, 16):
    effects += step(hand, "L0", (0, i), (1, i), dt=4.0)

  fence = only(effects, events.Fence)
  assert fence.learner == "L0"
  assert "did not give data shard 1 back" in fence.reason
  assert only(hand.join("L1", nonce="new"), events.Welcome).positions[0] == (
    1,
    1,
  )


def test_a_process_that_was_away_joins_anew_and_may_reconnect_again():
  hand = pair()
  lend(hand)
  step(hand, "L0", (0, 8), (1, 3))
  hand.join("L1")  # The very process, as by a partition.
  step(hand, "L0", (0, 9), returned=((1, 3),))

  again = only(hand.join("L1"), events.Welcome)
  reconnected = only(hand.join("L1"), events.Welcome)

  assert not again.reconnect
  assert again.incarnation > 2
  assert reconnected.reconnect


def test_a_newcomer_gets_a_lent_shard_where_no_other_is_left():
  hand = pair()
  lend(hand)
  step(hand, "L0", (0, 8), (1, 3))

  waits = hand.join("L2", takes_shards=True)
  step(hand, "L0", (0, 9), returned=((1, 3),))
  welcome = only(hand.join("L2", takes_shards=True), events.Welcome)

  assert only(waits, events.Reject).code == "UNAVAILABLE"
  assert welcome.positions == (Position(1, 3),)
  assert hand.state.learners["L1"].shards == ()


def test_ownership_and_lent_shards_survive_the_syncer():
  hand = pair()
  lend(hand)
  step(hand, "L0", (0, 8), (1, 3))

  later = Hand(TWO, machine.restore(TWO, machine.save(hand.state)))
  told = only(
    later.tell(events.Joined(learner="L0", nonce="L0-0", takes_shards=True)),
    events.Shards,
  )

  assert {shard for shard, _ in told.positions} == {0, 1}
