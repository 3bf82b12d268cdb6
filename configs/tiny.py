"""The demo: a byte model of 230,000 parameters on the standard library's text.

Command:  python -m ddiloco_jax.cli.local --config=configs/tiny.py --learners=4
          python -m ddiloco_jax.train --config=configs/tiny.py   (one, plainly)
Hardware: two CPU cores, 4 GB of memory.
Time:     a lone learner takes 0.073 s a step there; four share the cores, and
          reach t = 480 in 105 s, one of them killed for a third of it.
Loss:     nats per byte of held-out text. CPython 3.11.7, where bigrams have
          2.451: a lone learner 1.93 after 547 of 547 steps, four to t = 600
          1.80 (docs/quality.md). CPython 3.11.2, where bigrams have 2.416: 1.90
          at t = 480 with the kill (scripts/demo.sh at commit 6b049ed).
"""

from ddiloco_jax.config import default

NUM_STEPS = 480


def get_config():
  cfg = default()
  cfg.run.name = "tiny"
  cfg.run.directory = "runs/tiny"
  cfg.run.num_steps = NUM_STEPS
  cfg.run.log_every_steps = 5
  cfg.run.checkpoint_every_s = 20.0
  cfg.run.checkpoint_every_steps = 100

  cfg.model.embed_dim = 64
  cfg.model.num_layers = 4
  cfg.model.num_heads = 4
  cfg.model.num_kv_heads = 2
  cfg.model.head_dim = 16
  cfg.model.mlp_dim = 192

  cfg.train.batch_size = 8
  cfg.train.seq_len = 128
  cfg.train.learning_rate = 4e-3
  cfg.train.warmup_steps = 40
  cfg.train.decay_steps = NUM_STEPS

  cfg.evaluate.every_steps = 60
  cfg.evaluate.num_windows = 128

  cfg.sync.num_fragments = 24
  cfg.sync.cycle_steps = 24
  cfg.sync.max_open_rounds = 2
  cfg.sync.quorum = 1
  cfg.sync.num_syncer_steps = NUM_STEPS
  cfg.sync.max_learners = 8
  cfg.sync.num_shards = 8
  cfg.sync.lease_s = 10.0
  cfg.sync.quorum_timeout_s = 300.0
  return cfg
