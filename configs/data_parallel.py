"""No syncer: the tokens of four `tiny` learners in one, data-parallel.

Command:  XLA_FLAGS=--xla_force_host_platform_device_count=4 \
            python -m ddiloco_jax.train --config=configs/data_parallel.py
          On one device it is the same training: --config.mesh.data=1.
Hardware: four devices; four forced ones on two CPU cores show that it is right,
          and are slower than one.
Time:     not measured alone; 1.2 to 2 s a step on one CPU device, beside other
          work that kept two cores four times over-committed.
Loss:     nats per byte of held-out text of CPython 3.11, on one device: 2.42
          after 100 steps, 1.97 after 200, 1.76 after 350. Bigrams: 2.451.
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
