"""Four learners at full speed and four that are 18 % slower.

Command:  python -m ddiloco_jax.cli.simulate --config=configs/sim/heterogeneous.py
Hardware: one CPU core.
"""

from ddiloco_jax.chaos.scenario import Scenario
from ddiloco_jax.config import default_of


def get_config():
  cfg = default_of(Scenario())
  cfg.run.study = "heterogeneous"
  cfg.run.duration_s = 20_000.0
  cfg.learners.num = 8
  cfg.learners.step_s = 10.0
  cfg.learners.step_spread = 0.1
  cfg.learners.slowdowns = (1.0,) * 4 + (1.18,) * 4
  # What is compared is speed: no chip fails in this time.
  cfg.fleet.chips = 1
  cfg.sync.lease_s = 120.0
  return cfg
