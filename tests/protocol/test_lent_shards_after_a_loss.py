"""What was lent, and lost by a restart, is not trained on by two that merge it."""

import dataclasses

import pytest

from ddiloco_jax.protocol import events, machine
from ddiloco_jax.protocol.events import Position
from tests.protocol.by_hand import ONE, Hand

LENT = dataclasses.replace(ONE, num_shards=2, lease_s=3.0, shard_lease_s=6.0)


def joined() -> Hand:
  """Owners of shards 0 and 1."""
  hand = Hand(LENT)
  for name in ("ada", "bob"):
    hand.join(name, takes_shards=True)
  return hand


def restored(hand: Hand, saved: dict) -> Hand:
  again = Hand(LENT, machine.restore(LENT, saved))
  again.incarnations = dict(hand.incarnations)
  return again


def lent(hand: Hand) -> None:
  """ada is away for so long that bob reads her shard."""
  for _ in range(12):
    hand.now += 1.0
    hand.report("bob", positions=(Position(1, hand.steps["bob"] + 1),))
  assert hand.state.learners["bob"].reads == (1, 0)


def rejoin(hand: Hand, **said) -> events.Welcome:
  base = hand.state.fragments[0].version
  (welcome,) = (
    e
    for e in hand.tell(
      events.Joined(
        learner="bob",
        nonce="bob-0",
        bases=(base,),
        takes_shards=True,
        **said,
      )
    )
    if isinstance(e, events.Welcome)
  )
  return welcome


@pytest.mark.parametrize(
  ("said", "is_known"),
  [
    ({"reads": (1,)}, True),
    ({"reads": (0, 1)}, False),
    ({"reads": (1,), "returned": (Position(0, 3),)}, False),
  ],
)
def test_who_reads_what_a_restart_has_lost_is_another_process(said, is_known):
  hand = joined()
  saved = machine.save(hand.state)
  lent(hand)

  welcome = rejoin(restored(hand, saved), **said)

  assert welcome.reconnect == is_known
  if not is_known:
    assert [p.shard for p in welcome.positions] == [1]


def test_who_gave_a_shard_back_that_a_restart_has_lent_it_is_another_process():
  hand = joined()
  lent(hand)
  saved = machine.save(hand.state)

  welcome = rejoin(
    restored(hand, saved), reads=(1,), returned=(Position(0, 3),)
  )

  assert not welcome.reconnect


def test_a_shard_is_given_back_in_its_time_where_lending_was_turned_off():
  hand = joined()
  lent(hand)
  off = dataclasses.replace(LENT, shard_lease_s=0.0)
  again = Hand(off, machine.restore(off, machine.save(hand.state)))
  again.incarnations = dict(hand.incarnations)
  rejoin(again, reads=(0, 1))
  again.tell(events.Joined(learner="ada", nonce="ada-1", takes_shards=True))
  again.tick(1.0)

  assert not again.of(events.Fence)
