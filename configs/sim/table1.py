"""Goodput on fleets of 150,000 to 2.4 million chips, beside the paper's Table 1.

Command:  python -m ddiloco_jax.cli.simulate --config=configs/sim/table1.py
          --processes=2 makes use of a second core.
Hardware: one CPU core.

The paper does not say what an interruption costs. The costs and the step time
below are a fit to half of its cells: scripts/fit_table1.py, docs/simulator.md.
"""

from ddiloco_jax.chaos.scenario import Scenario
from ddiloco_jax.config import default_of


def get_config():
  cfg = default_of(Scenario())
  cfg.run.study = "table1"
  cfg.fleet.slice_chips = 373
  cfg.fleet.detection_s = 5.0
  cfg.fleet.downscale_s = 14.5
  cfg.fleet.upscale_s = 14.9
  cfg.fleet.upscale_every_s = 367.0
  cfg.repair.law = "constant"
  cfg.repair.mean_s = 60.4
  cfg.learners.step_s = 4.1
  cfg.learners.step_spread = 0.0
  cfg.sync.lease_s = 120.0
  # Goodput does not depend on how often fragments are exchanged.
  cfg.sync.num_fragments = 4
  return cfg
