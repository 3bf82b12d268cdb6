"""Learners and a syncer in virtual time."""

import dataclasses
import math

import pytest

from ddiloco_jax.chaos import scenario as scenarios
from ddiloco_jax.chaos import simulate
from ddiloco_jax.chaos.fleet import FleetConfig
from ddiloco_jax.chaos.systems import (
  data_parallel,
  decoupled,
  diloco,
  streaming_diloco,
)
from ddiloco_jax.chaos.traffic import LinkConfig
from ddiloco_jax.protocol import machine, status
from ddiloco_jax.protocol.rules import Rules

CALM = scenarios.Scenario(
  run=scenarios.RunConfig(duration_s=3600.0),
  learners=scenarios.LearnersConfig(num=4, step_s=5.0),
  fleet=FleetConfig(mtbi_days=math.inf),
  sync=Rules(num_fragments=6, cycle_steps=12, max_learners=8, num_shards=8),
)
STORMY = dataclasses.replace(CALM, fleet=FleetConfig(chips=2_400_000))


def learners(scenario, **changes):
  fresh = dataclasses.replace(scenario.learners, **changes)
  return dataclasses.replace(scenario, learners=fresh)


def rules(scenario, **changes):
  fresh = dataclasses.replace(scenario.sync, **changes)
  return dataclasses.replace(scenario, sync=fresh)


def play(scenario):
  simulation = simulate.Simulation(scenario)
  simulation.run()
  return simulation


def test_without_failures_no_time_is_lost_and_all_contribute():
  run = play(CALM)

  assert run.tally.goodput == pytest.approx(1.0, abs=1e-6)
  assert run.tally.uptime == 1.0
  assert run.tally.num_merges == pytest.approx(3600 / 5 / 2, rel=0.03)
  contributing = run.tally.num_contributors / run.tally.num_merges
  assert contributing > 3.9


def test_the_same_seed_gives_the_same_bits():
  one, same = play(STORMY), play(STORMY)
  seeded = scenarios.RunConfig(seed=1, duration_s=3600.0)
  other = play(dataclasses.replace(STORMY, run=seeded))

  digests = [machine.digest(run.state) for run in (one, same, other)]
  assert digests[0] == digests[1] != digests[2]
  assert one.tally.goodput == same.tally.goodput != other.tally.goodput


def test_in_a_storm_merges_go_on_and_every_token_is_in_a_book():
  run = play(STORMY)

  books = {
    book.name: book.tokens for book in status.status(run.state, run.now).books
  }
  reported = books.pop("reported")
  assert 0.5 < run.tally.goodput < 0.9
  assert run.tally.num_merges > 250
  assert sum(books.values()) == pytest.approx(reported)
  assert books["merged"] > 0.6 * reported


def test_a_slow_learner_costs_the_others_nothing():
  run = play(learners(CALM, slowdowns=(1.0, 1.0, 3.0)))

  assert run.tally.goodput == pytest.approx(1.0, abs=1e-6)


def test_under_max_ahead_the_fast_wait_for_a_quorum_of_all():
  slow = learners(CALM, slowdowns=(1.0, 1.0, 1.0, 2.0))

  run = play(rules(slow, quorum=4, max_ahead=2))

  # Three of four keep half of their speed.
  assert run.tally.goodput == pytest.approx(0.625, abs=0.02)


def test_a_synchronous_exchange_is_waited_for_and_a_streamed_one_is_not():
  thin = dataclasses.replace(CALM, link=LinkConfig(gbit_per_s=100.0))
  thin = rules(thin, max_open_rounds=2)
  # Up and down, and the merge, of all in one and of a sixth.
  whole_s = 2 * 5e9 * 16 / 100e9 + 2 * 0.02 + 0.5

  waited = diloco.simulate(thin)
  streamed = streaming_diloco.simulate(thin)

  assert waited.goodput == pytest.approx(60 / (60 + whole_s), abs=0.01)
  assert streamed.goodput > 0.99


def test_a_link_too_thin_for_its_fragments_stales_them_and_stops_nobody():
  thin = dataclasses.replace(CALM, link=LinkConfig(gbit_per_s=1.0))

  run = play(thin)

  assert run.tally.goodput == pytest.approx(1.0, abs=1e-6)
  assert 0 < run.tally.num_merges < 300


@pytest.mark.parametrize("elastic", [True, False])
def test_data_parallel_loses_more_than_learners_do(elastic):
  alone = data_parallel.simulate(STORMY, elastic=elastic)

  assert alone.goodput < decoupled.simulate(STORMY).goodput - 0.2
  assert alone.uptime < 0.9


def test_all_learners_of_a_scenario_are_admitted():
  many = learners(rules(CALM, max_learners=2, num_shards=2), num=6)

  run = play(decoupled.admitting(many))

  assert run.state.num_live == 6


@pytest.mark.parametrize(
  ("wrong", "rule"),
  [
    ({"num": 0}, "at least 1"),
    ({"step_s": 0.0}, "above 0"),
    ({"slowdowns": (1.0,) * 9}, "at most one for each"),
  ],
)
def test_learners_that_cannot_be_are_refused(wrong, rule):
  with pytest.raises(ValueError, match=rule):
    scenarios.LearnersConfig(**wrong)
