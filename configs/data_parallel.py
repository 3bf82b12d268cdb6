"""No syncer: the tokens of four `tiny` learners in one, data-parallel.

Command:  XLA_FLAGS=--xla_force_host_platform_device_count=4 \
            python -m ddiloco_jax.train --config=configs/data_parallel.py
          On one device it is the same training: --config.mesh.data=1.
Hardware: four devices; four forced ones on two CPU cores show that it is right,
          and are slower than one.
Time:     DPTIME
Loss:     DPLOSS
"""

from pathlib import Path

from ddiloco_jax.config import load_file


def get_config():
  cfg = load_file(str(Path(__file__).with_name("tiny.py")))
  cfg.run.name = "data_parallel"
  cfg.run.directory = "runs/data_parallel"
  cfg.mesh.data = 4
  cfg.train.batch_size = 4 * cfg.train.batch_size
  return cfg
