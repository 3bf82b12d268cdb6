"""FedOpt (arXiv 2003.00295): FedAvg with an adaptive optimizer outside.

Command:  python -m ddiloco_jax.cli.local --config=configs/fedopt.py --learners=4
          --config.outer.name=yogi for FedYogi; another number M of learners:
          --config.sync.quorum=M.
Hardware: two CPU cores, 4 GB of memory.
Time:     not measured; about that of `tiny`, and it stops for a killed learner.
Loss:     not measured. A test holds it equal to optax by hand.
"""

from pathlib import Path

from ddiloco_jax.config import load_file


def get_config():
  cfg = load_file(str(Path(__file__).with_name("fedavg.py")))
  cfg.run.name = "fedopt"
  cfg.run.directory = "runs/fedopt"
  cfg.outer.name = "adam"
  cfg.outer.learning_rate = 1e-2
  cfg.outer.b1 = 0.9
  cfg.outer.b2 = 0.99
  cfg.outer.eps = 1e-3
  return cfg
