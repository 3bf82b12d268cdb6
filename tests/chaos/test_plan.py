import dataclasses
import itertools
import json
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco_jax.chaos.plan import (
  MIX,
  SYNCER,
  ChaosConfig,
  Kind,
  plan_faults,
  to_dict,
)

configs = st.builds(
  ChaosConfig,
  seed=st.integers(0, 2**32),
  num_learners=st.integers(1, 9),
  duration_s=st.floats(60.0, 1200.0),
  faults_per_hour=st.floats(0.0, 2000.0),
  syncer_kills=st.integers(0, 3),
)


def by_target(faults):
  targets: dict[int, list] = {}
  for fault in faults:
    targets.setdefault(fault.target, []).append(fault)
  return targets


@settings(max_examples=60)
@given(configs)
def test_no_process_has_two_faults_at_once_and_all_begin_in_the_storm(cfg):
  faults = plan_faults(cfg)

  assert list(faults) == sorted(faults, key=lambda f: (f.at_s, f.target))
  assert all(0.0 <= f.at_s <= cfg.duration_s for f in faults)
  for target, own in by_target(faults).items():
    assert SYNCER <= target < cfg.num_learners
    assert all(a.end_s <= b.at_s for a, b in itertools.pairwise(own))


@settings(max_examples=30)
@given(configs)
def test_a_plan_follows_from_its_config(cfg):
  assert plan_faults(cfg) == plan_faults(cfg)


def test_another_seed_is_another_storm():
  cfg = ChaosConfig()

  assert plan_faults(cfg) != plan_faults(dataclasses.replace(cfg, seed=1))


def test_kills_of_the_syncer_move_no_other_fault():
  cfg = ChaosConfig(duration_s=600.0)
  with_kills = plan_faults(dataclasses.replace(cfg, syncer_kills=3))

  kills = [f for f in with_kills if f.target == SYNCER]

  assert tuple(f for f in with_kills if f.target != SYNCER) == plan_faults(cfg)
  assert [f.kind for f in kills] == [Kind.KILL] * 3
  assert [int(f.at_s // 200.0) for f in kills] == [0, 1, 2]


def test_every_storm_has_the_mix():
  cfg = ChaosConfig(faults_per_hour=600.0, duration_s=600.0)

  counts = Counter(fault.kind for fault in plan_faults(cfg))

  assert counts == {kind: 5 * cards for kind, cards in MIX.items()}
  share = {kind: cards / sum(MIX.values()) for kind, cards in MIX.items()}
  assert share[Kind.KILL] == share[Kind.PARTITION] == 0.2
  assert share[Kind.STOP] == share[Kind.SLOW] == 0.25
  assert share[Kind.DISK] + share[Kind.CLOCK] == pytest.approx(0.1)


def test_stops_and_partitions_last_three_to_ten_seconds():
  faults = plan_faults(ChaosConfig(faults_per_hour=3000.0, num_learners=40))

  lasts = [f.lasts_s for f in faults if f.kind in (Kind.STOP, Kind.PARTITION)]

  assert 3.0 <= min(lasts) < 4.0
  assert 9.0 < max(lasts) <= 10.0


def test_a_fault_is_strict_json_without_what_is_not_its_kinds():
  fault = next(f for f in plan_faults(ChaosConfig()) if f.kind is Kind.STOP)

  values = json.loads(json.dumps(to_dict(fault), allow_nan=False))

  assert set(values) == {"at_s", "kind", "target", "lasts_s"}


@pytest.mark.parametrize(
  ("values", "said"),
  [
    ({"num_learners": 0}, "num_learners is 0"),
    ({"duration_s": 0.0}, "duration_s is 0.0"),
    ({"faults_per_hour": -1.0}, "faults_per_hour is -1.0"),
    ({"duration_s": math.inf}, "duration_s is inf; .*at most 604800 s"),
    ({"duration_s": math.nan}, "duration_s is nan"),
    ({"faults_per_hour": math.inf}, "faults_per_hour is inf; .*at most 36000"),
    ({"faults_per_hour": 1e308}, r"faults_per_hour is 1e\+308"),
    ({"faults_per_hour": math.nan}, "faults_per_hour is nan"),
    ({"longest_s": math.nan}, "longest_s is nan"),
    ({"longest_s": math.inf}, "longest_s is inf"),
    ({"down_s": math.inf}, "down_s is inf"),
    ({"syncer_down_s": math.inf}, "syncer_down_s is inf"),
    ({"syncer_kills": 10**400}, "do not fit into 300 s"),
    ({"shortest_s": 11.0}, "longest_s 10.0 is below shortest_s 11.0"),
    ({"syncer_kills": 40}, "do not fit into 300 s"),
  ],
)
def test_a_storm_that_cannot_be_is_refused(values, said):
  with pytest.raises(ValueError, match=said):
    ChaosConfig(**values)
