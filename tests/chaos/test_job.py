"""What an SPMD job does between its steps when its chips fail."""

import dataclasses
import math

import pytest

from ddiloco_jax.chaos import fleet, job, repair
from ddiloco_jax.chaos.fleet import Interruption
from ddiloco_jax.chaos.job import Step

FLEET = fleet.FleetConfig(
  chips=1000,
  slice_chips=250,
  detection_s=5.0,
  downscale_s=10.0,
  upscale_s=20.0,
  upscale_every_s=0.0,
)


def make_job(*, elastic=True, **changes):
  cfg = dataclasses.replace(FLEET, **changes)
  return job.Job(cfg, 0.0, 1.0, elastic=elastic)


def hit(at_s, place=0.0, repair_s=100.0):
  return Interruption(at_s, place, repair_s)


def test_without_interruptions_it_steps_back_to_back():
  spmd, now = make_job(), 0.0

  for n in range(10):
    step = spmd.next_step(now, 3.0)
    assert step == Step(3.0 * n, 3.0 * (n + 1), 1.0)
    now = step.end_s


def test_an_elastic_job_goes_on_with_less_and_takes_the_slice_back():
  spmd = make_job()
  spmd.next_step(0.0, 10.0)
  spmd.hit(hit(4.0, place=0.6))

  less = spmd.next_step(10.0, 10.0)
  steps = [less]
  while steps[-1].share < 1:
    steps.append(spmd.next_step(steps[-1].end_s, 10.0))

  # The step under way ends; noticed at 15, reconfigured by 25.
  assert less == Step(25.0, 35.0, 0.75)
  # Back at 115, taken back at the boundary of that time.
  assert steps[-1].start_s == 135.0
  assert steps[-2].end_s == 115.0
  assert spmd.num_grown == 1


def test_what_comes_back_meanwhile_comes_along():
  spmd = make_job()
  spmd.next_step(0.0, 10.0)
  spmd.hit(hit(4.0, place=0.6, repair_s=3.0))  # Back before it goes on.

  assert spmd.next_step(10.0, 10.0) == Step(25.0, 35.0, 1.0)


def test_growth_waits_until_it_is_due():
  spmd = make_job(upscale_every_s=1000.0)
  now = spmd.next_step(0.0, 10.0).end_s
  shares = []
  for at_s in (5.0, 400.0):
    spmd.hit(hit(at_s, place=0.6))
    while now < at_s + 300.0:
      step = spmd.next_step(now, 10.0)
      shares.append(step.share)
      now = step.end_s

  assert spmd.num_grown == 1  # The second is not due yet.
  assert shares[-1] == 0.75


def test_a_job_of_one_slice_stands_until_that_is_back():
  spmd = make_job(slice_chips=1000)
  spmd.next_step(0.0, 10.0)
  spmd.hit(hit(4.0))

  assert spmd.next_step(10.0, 10.0) == Step(135.0, 145.0, 1.0)


def test_one_that_is_not_elastic_stands_until_all_is_repaired():
  spmd = make_job(elastic=False)
  spmd.next_step(0.0, 10.0)
  spmd.hit(hit(4.0, place=0.1, repair_s=50.0))
  spmd.hit(hit(6.0, place=0.9, repair_s=100.0))

  assert spmd.next_step(10.0, 10.0) == Step(135.0, 145.0, 1.0)


def test_chips_that_stand_still_are_not_interrupted():
  spmd = make_job()
  spmd.next_step(0.0, 10.0)
  spmd.hit(hit(4.0))
  step = spmd.next_step(10.0, 10.0)
  spmd.hit(hit(20.0, place=0.9))  # While it reconfigures.

  assert spmd.next_step(step.end_s, 10.0).start_s == step.end_s
  assert spmd.num_interrupted == 1


@pytest.mark.parametrize("chips", [200_000, 2_000_000])
def test_one_job_without_overlap_has_the_closed_form(chips):
  law = repair.RepairConfig(law="constant", mean_s=30.0)
  cfg = dataclasses.replace(FLEET, chips=chips)
  fleet_ = job.Fleet(cfg, law, 0, elastic=False)
  num, step_s, now, useful_s = 4000, 0.5, 0.0, 0.0
  while now < num * cfg.mtbf_s:
    step = fleet_.next_step(0, now, step_s)
    useful_s += step.end_s - step.start_s
    now = step.end_s

  down_s = cfg.detection_s + 30.0 + cfg.upscale_s
  up_s = step_s / -math.expm1(-step_s / cfg.mtbf_s)  # In whole steps.
  expected = up_s / (up_s + down_s)
  error = expected * (1 - expected) / math.sqrt(num * expected)
  assert useful_s / now == pytest.approx(expected, abs=4 * error)


def test_the_same_interruption_hits_every_division_of_a_fleet():
  cfg = fleet.FleetConfig(chips=1_000_000)
  law = repair.RepairConfig()
  counts = []
  for num in (1, 4):
    jobs = job.Fleet(cfg, law, 7, num)
    for n in range(num):
      now = 0.0
      while now < 3600.0:
        now = jobs.next_step(n, now, 1.0).end_s
    counts.append(sum(each.num_interrupted for each in jobs.jobs))

  assert counts[0] > 20
  assert counts[1] > counts[0]  # Of four, three go on and can be hit.
