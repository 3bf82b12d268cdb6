"""The two settings that make a learner wait."""

import time

from ddiloco_jax import config
from tests.support.in_process import syncer_run, train_all
from tests.support.quadratic import Quadratic, constant_batches

SHAPES = {"a": (3,), "b": (2, 2), "c": (5,)}


def test_a_fast_learner_stays_within_max_ahead_of_the_slow_one(tmp_path):
  cfg = config.default()
  cfg.fragments.num_fragments = 3
  cfg.sync.cycle_steps = 6
  cfg.sync.quorum = 2
  cfg.sync.max_ahead = 2
  cfg.sync.num_syncer_steps = 30
  slow = Quadratic(SHAPES, 1.0, pause=lambda: time.sleep(0.03))
  lead = []

  def pause():
    lead.append(len(fast.indices) - len(slow.indices))

  fast = Quadratic(SHAPES, 2.0, pause=pause)

  with syncer_run(config.freeze(cfg), tmp_path, theta=slow.params) as run:
    finished = train_all(run, [fast, slow], constant_batches(4))

  assert finished.exit_code == 0
  assert len(fast.indices) >= 20
  # One step may be under way at the slow one, and one report on its way.
  assert max(lead) <= 2 + 2
