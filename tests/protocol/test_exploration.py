"""Random schedules of the machine among faults; and faults that must be found."""

import pytest

from scripts.exploration import plants, reasons, schedule, shrink, world
from scripts.exploration.laws import LAWS, Laws

NUM_SCHEDULES = 100  # `python scripts/explore.py` plays any number.


def test_no_law_is_broken_in_random_schedules():
  reached = reasons.Reached()
  for index in range(NUM_SCHEDULES):
    laws = Laws(reached)
    world.run(schedule.draw(seed=1, index=index), laws)
    assert laws.num_events >= schedule.NUM_EVENTS

  counts = reached.counts.values()
  assert sum(num > 0 for num in counts) > 0.8 * len(counts)


def test_a_schedule_is_the_same_whenever_it_is_drawn_and_played():
  drawn = schedule.draw(seed=0, index=5)

  assert drawn == schedule.draw(seed=0, index=5)
  assert drawn != schedule.draw(seed=0, index=6)
  assert shrink.trace(drawn) == shrink.trace(drawn)


@pytest.mark.parametrize("name", plants.PLANTS)
def test_a_planted_fault_is_found(name):
  with plants.planted(name):
    found = (shrink.broken(schedule.draw(0, index)) for index in range(2000))
    error = next((error for error in found if error), None)

  assert error is not None
  assert error.law in LAWS


def test_a_planted_fault_is_shrunk_to_a_few_choices():
  with plants.planted("double_merge"):
    drawn = (schedule.draw(0, index) for index in range(100))
    whole, error = next((s, e) for s in drawn if (e := shrink.broken(s)))
    shrunk = shrink.shrink(whole, error.law)
    told = shrink.trace(shrunk)

  assert len(shrunk.choices) <= 12
  assert told[-1].startswith(f"BROKEN: {error.law}")
  assert shrink.broken(shrunk) is None  # Nothing stays planted.


def test_every_reason_of_the_deciding_modules_is_listed():
  sentences = reasons.sentences()

  assert "the run has finished" in sentences
  assert "round {} of fragment {} is closed" in sentences
  assert len(sentences) > 40
