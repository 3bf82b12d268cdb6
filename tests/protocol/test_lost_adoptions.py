"""What an adoption resets is booked, though its `applied` was lost on its way."""

import dataclasses

import pytest

from ddiloco_jax.protocol import check, events, machine
from ddiloco_jax.protocol.events import Adoption, Counts, Version
from tests.protocol.by_hand import ONE, Hand, only

FIRST = Adoption(0, Version(1, 0), 0, Counts())


def adoption(n: int, step: int, num_reset: int) -> Adoption:
  return Adoption(0, Version(1, n), step, Counts(num_reset, num_reset * 100))


def published(num: int = 1) -> Hand:
  """L0 is in a run whose newest version is `num`, and trains from 0."""
  hand = Hand()
  hand.join("L1")
  hand.join("L0")
  for _ in range(num):
    hand.cycle(["L1"])
  return hand


def adopted() -> Hand:
  """L0 has said that it adopted version 1 after 3 steps, and took 2 more."""
  hand = published()
  hand.report("L0", steps=3)
  hand.apply("L0")
  hand.report("L0", steps=2)
  return hand


def hello(*adoptions: Adoption, nonce: str = "L0-0") -> events.Joined:
  return events.Joined(
    learner="L0",
    nonce=nonce,
    bases=(adoptions[-1].version,),
    adoptions=adoptions,
  )


def come_back(hand: Hand, *adoptions: Adoption) -> events.Welcome:
  event = hello(*adoptions)
  check.check(hand.state, event)
  return only(hand.tell(event), events.Welcome)


def test_steps_after_the_last_report_are_booked():
  hand = published()
  hand.report("L0", steps=2)

  # Of its third step, and of the adoption after it, nobody was told.
  assert come_back(hand, FIRST, adoption(1, 3, 3)).reconnect

  assert hand.totals("L0").reported == Counts(3, 300)
  books = dict(hand.totals("L0").discarded)
  assert books == {"overwritten_in_flight": Counts(3, 300)}
  assert hand.state.learners["L0"].bases == (Version(1, 1),)
  assert hand.state.learners["L0"].adopted_at == (3,)


def test_each_of_two_lost_adoptions_is_booked():
  hand = published(num=2)
  hand.report("L0", steps=2)

  come_back(hand, FIRST, adoption(1, 3, 3), adoption(2, 5, 2))

  assert hand.totals("L0").reported == Counts(5, 500)


def test_an_adoption_that_arrived_is_not_booked_again():
  hand = adopted()

  come_back(hand, FIRST, adoption(1, 3, 3))
  come_back(hand, FIRST, adoption(1, 3, 3))

  assert hand.totals("L0").reported == Counts(5, 500)
  assert hand.state.learners["L0"].counts == (Counts(2, 200),)


def test_one_that_was_told_before_the_last_state_was_saved_is_not_booked_again():
  hand = adopted()
  saved = machine.save(hand.state)

  restored = Hand(ONE, machine.restore(ONE, saved, epoch=2))
  come_back(restored, FIRST, adoption(1, 3, 3))

  assert restored.totals("L0").reported == Counts(5, 500)


def test_a_version_that_was_adopted_once_more_counts_anew():
  # The last publication is adopted whole, from the same version.
  hand = adopted()

  come_back(hand, FIRST, adoption(1, 3, 3), adoption(1, 6, 3))

  assert hand.totals("L0").reported == Counts(6, 600)
  report = events.Reported(**hand.where("L0"), step=6, counts=(Counts(0, 0),))
  check.check(hand.state, report)


def test_what_a_process_that_is_over_adopted_is_not_booked_for_the_next():
  hand = published()
  hand.report("L0", steps=2)
  hand.tell(events.Disconnected(**hand.where("L0")))

  event = hello(FIRST, adoption(1, 3, 3), nonce="another")
  assert not only(hand.tell(event), events.Welcome).reconnect

  assert hand.totals("L0").reported == Counts(2, 200)


@pytest.mark.parametrize(
  ("wrong", "match"),
  [
    (adoption(1, 3, 4), "4 steps since the adoption"),
    (adoption(9, 3, 3), "version 9 of epoch 1 of fragment 0 was never"),
    (adoption(1, 3, 3)._replace(fragment=7), "fragment 7 does not"),
    (
      adoption(1, 3, 2)._replace(counts=Counts(2, 900)),
      "only a step adds tokens",
    ),
  ],
)
def test_an_adoption_that_cannot_be_is_refused_in_a_hello_too(wrong, match):
  hand = published()
  hand.report("L0", steps=2)

  with pytest.raises(ValueError, match=match):
    check.check(hand.state, hello(FIRST, wrong))


def test_a_hello_whose_base_is_not_its_last_adoption_is_refused():
  # Read at two moments: taking both would book the steps between them twice.
  hand = published()
  event = hello(FIRST, adoption(1, 3, 3))
  torn = dataclasses.replace(event, bases=(Version(1, 0),))

  with pytest.raises(ValueError, match="base 0 of epoch 1 of fragment 0, and"):
    check.check(hand.state, torn)


def test_who_resumes_invents_no_adoptions_either():
  hand = published()
  hand.report("L0", steps=2)
  event = hello(FIRST, adoption(1, 3, 10**6), nonce="fresh")

  with pytest.raises(ValueError, match="1000000 steps since the adoption"):
    check.check(hand.state, dataclasses.replace(event, resumes="L0-0"))


def test_a_hello_has_a_few_adoptions_of_each_fragment():
  hand = published()

  with pytest.raises(ValueError, match="more than 4 adoptions of fragment 0"):
    check.check(hand.state, hello(*[adoption(1, 3, 3)] * 5))


def test_adoptions_after_one_that_nobody_names_any_more_are_taken():
  hand = published(num=6)
  hand.report("L0", steps=5)
  told = [
    Adoption(0, Version(1, n), 5 + n, Counts(1, 900)) for n in range(2, 6)
  ]

  assert come_back(hand, *told).reconnect

  # Of the lost one nothing is known, and the first of these counts for its base.
  assert hand.totals("L0").reported.steps == 5 + 3
