"""DiLoCo (arXiv 2311.08105): all learners wait for each other every H steps.

One fragment, a quorum of all, a plain average. H and the model are those of
`tiny`, the outer step is the paper's.

Command:  python -m ddiloco_jax.cli.local --config=configs/diloco.py --learners=4
          Another number M of learners: --config.sync.quorum=M.
Hardware: two CPU cores, 4 GB of memory.
Time:     not measured; about that of `tiny`, and it stops for a killed learner.
Loss:     not measured; a test holds it equal to a reference of DiLoCo.
"""

from pathlib import Path

from ddiloco_jax.config import load_file


def get_config():
  cfg = load_file(str(Path(__file__).with_name("tiny.py")))
  cfg.run.name = "diloco"
  cfg.run.directory = "runs/diloco"
  cfg.run.lr_index = "own"
  cfg.sync.num_fragments = 1
  cfg.sync.max_open_rounds = 1
  cfg.sync.quorum = 4
  cfg.sync.wait_for_publication = True
  cfg.merge.direction = "average"
  cfg.outer.learning_rate = 0.7
  cfg.outer.momentum = 0.9
  cfg.wire.up_format = "float32"
  return cfg
