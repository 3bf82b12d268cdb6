"""Streaming DiLoCo (arXiv 2501.18512): fragment by fragment, adopted tau later.

Blocks dealt out over four fragments, each synchronized every H steps, six apart;
a merged fragment is adopted two steps after it was copied, half and half with
the learner's own.

Command:  python -m ddiloco_jax.cli.local \
            --config=configs/streaming_diloco.py --learners=4
          Another number M of learners: --config.sync.quorum=M.
Hardware: two CPU cores, 4 GB of memory.
Time:     not measured; about that of `tiny`, and it stops for a killed learner.
Loss:     not measured; a test holds it equal to a reference of Streaming DiLoCo.
"""

from pathlib import Path

from ddiloco_jax.config import load_file


def get_config():
  cfg = load_file(str(Path(__file__).with_name("diloco.py")))
  cfg.run.name = "streaming_diloco"
  cfg.run.directory = "runs/streaming_diloco"
  cfg.fragments.kind = "layer_strided"
  cfg.sync.num_fragments = 4
  cfg.sync.alpha = 0.5
  cfg.sync.adoption_delay_steps = 2
  return cfg
