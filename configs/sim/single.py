"""A day of a million chips in eight learners.

Command:  python -m ddiloco_jax.cli.simulate --config=configs/sim/single.py
Hardware: one CPU core.
"""

from ddiloco_jax.chaos.scenario import Scenario
from ddiloco_jax.config import default_of


def get_config():
  cfg = default_of(Scenario())
  cfg.fleet.chips = 1_000_000
  cfg.sync.lease_s = 120.0
  return cfg
