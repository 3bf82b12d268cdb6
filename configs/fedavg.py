"""FedAvg, or local SGD (arXiv 1602.05629): the weighted mean of the learners.

SGD inside; outside, SGD of rate 1 without momentum, which puts the average of
the deltas where it was taken from.

Command:  python -m ddiloco_jax.cli.local --config=configs/fedavg.py --learners=4
          Another number M of learners: --config.sync.quorum=M.
Hardware: two CPU cores, 4 GB of memory.
Time:     not measured; about that of `tiny`, and it stops for a killed learner.
Loss:     not measured; a test holds it equal to a reference of FedAvg. A lone
          learner with this SGD stands at 2.65 nats per byte after 150 steps,
          where AdamW has 2.49.
"""

from pathlib import Path

from ddiloco_jax.config import load_file


def get_config():
  cfg = load_file(str(Path(__file__).with_name("diloco.py")))
  cfg.run.name = "fedavg"
  cfg.run.directory = "runs/fedavg"
  cfg.train.optimizer = "sgd"
  cfg.train.learning_rate = 0.5
  cfg.train.weight_decay = 0.0
  cfg.outer.learning_rate = 1.0
  cfg.outer.momentum = 0.0
  cfg.outer.nesterov = False
  return cfg
