"""The tape of a fleet's interruptions, and the laws of repair."""

import dataclasses
import math

import numpy as np
import pytest

from ddiloco_jax.chaos import fleet, repair

A_MILLION = fleet.FleetConfig(chips=1_000_000)
LAW = repair.RepairConfig()


def read(cfg, until_s, seed=0, law=LAW):
  return fleet.Interruptions(cfg, law, seed).until(until_s)


@pytest.mark.parametrize(
  "law",
  [
    repair.RepairConfig(law="constant", mean_s=300.0),
    repair.RepairConfig(law="exponential", mean_s=300.0),
    repair.RepairConfig(law="weibull", mean_s=300.0, a=0.7, b=2.5),
  ],
)
def test_every_law_has_its_mean(law):
  u = (np.arange(100_000) + 0.5) / 100_000

  assert np.mean(repair.draw_s(law, u)) == pytest.approx(300.0, rel=0.01)


def test_the_weibull_law_is_the_exponentiated_one():
  law = repair.RepairConfig(law="weibull", mean_s=300.0, a=0.7, b=2.5)
  u = np.array([0.01, 0.3, 0.5, 0.9, 0.999])

  t = repair.draw_s(law, u)
  # Its scale from one point; the others then follow F.
  scale = t[0] / (-math.log(1 - u[0] ** (1 / 2.5))) ** (1 / 0.7)

  np.testing.assert_allclose((1 - np.exp(-((t / scale) ** 0.7))) ** 2.5, u)


@pytest.mark.parametrize(
  ("wrong", "rule"),
  [({"law": "lognormal"}, "one of"), ({"mean_s": 0.0}, "above 0")],
)
def test_a_law_that_cannot_be_is_refused(wrong, rule):
  with pytest.raises(ValueError, match=rule):
    repair.RepairConfig(**wrong)


def test_a_tape_has_the_rate_of_its_fleet_and_hits_chips_alike():
  tape = read(A_MILLION, 30 * fleet.DAY_S)

  expected = 30 * fleet.DAY_S / A_MILLION.mtbf_s
  assert len(tape) == pytest.approx(expected, abs=4 * math.sqrt(expected))
  assert np.mean([hit.place for hit in tape]) == pytest.approx(0.5, abs=0.01)
  assert [hit.at_s for hit in tape] == sorted(hit.at_s for hit in tape)


def test_the_same_seed_has_the_same_tape_however_it_is_read():
  whole = read(A_MILLION, 1e6, seed=3)
  tape = fleet.Interruptions(A_MILLION, LAW, 3)

  parts = [hit for end in range(1, 101) for hit in tape.until(1e4 * end)]

  assert parts == whole
  assert read(A_MILLION, 1e6, seed=4) != whole


def test_another_law_of_repair_leaves_times_and_places():
  slow = repair.RepairConfig(law="constant", mean_s=1e5)

  one, other = read(A_MILLION, 1e5), read(A_MILLION, 1e5, law=slow)

  assert [hit[:2] for hit in one] == [hit[:2] for hit in other]
  assert {hit.repair_s for hit in other} == {1e5}


def test_chips_that_never_fail_have_an_empty_tape():
  never = dataclasses.replace(A_MILLION, mtbi_days=math.inf)

  assert read(never, 1e12) == []


def test_more_chips_need_no_more_memory():
  tapes = [
    fleet.Interruptions(fleet.FleetConfig(chips=chips), LAW, 0)
    for chips in (1000, 100_000_000)
  ]
  for tape in tapes:
    tape.until(1e4)

  assert {len(tape._drawn) for tape in tapes} == {1024}


@pytest.mark.parametrize(
  ("wrong", "rule"),
  [
    ({"chips": 0}, "at least 1"),
    ({"mtbi_days": 0.0}, "above 0"),
    ({"detection_s": -1.0}, "at least 0 seconds"),
    ({"upscale_s": math.inf}, "finite"),
  ],
)
def test_a_fleet_that_cannot_be_is_refused(wrong, rule):
  with pytest.raises(ValueError, match=rule):
    fleet.FleetConfig(**wrong)
