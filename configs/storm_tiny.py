"""Eight learners in a storm: a byte model of 180,000 parameters, short leases.

Command:  python -m ddiloco_jax.cli.storm --config=configs/storm_tiny.py \\
            --learners=8 --faults_per_hour=600 --minutes=5 --syncer_kills=3
Hardware: two CPU cores, 6 GB of memory. A step takes 0.5 s, most of it waited,
          as on an accelerator: who is started again needs a core.
Time:     the storm's minutes, and twice that with its fault-free pair.
Loss:     judged against the pair, not by itself.
"""

from ddiloco_jax.config import default


def get_config():
  cfg = default()
  cfg.run.name = "storm_tiny"
  cfg.run.directory = "runs/storm_tiny"
  cfg.run.step_s = 0.5
  cfg.run.log_every_steps = 20
  cfg.run.checkpoint_every_s = 10.0
  cfg.run.checkpoint_every_steps = 50

  cfg.model.embed_dim = 64
  cfg.model.num_layers = 3
  cfg.model.num_heads = 4
  cfg.model.num_kv_heads = 2
  cfg.model.head_dim = 16
  cfg.model.mlp_dim = 192

  cfg.train.batch_size = 8
  cfg.train.seq_len = 96
  cfg.train.learning_rate = 3e-3
  cfg.train.warmup_steps = 20
  # Constant: the pair merges the same tokens at another t.
  cfg.train.decay_steps = 20
  cfg.train.min_lr_ratio = 1.0

  cfg.evaluate.num_windows = 256

  cfg.sync.num_fragments = 12
  cfg.sync.cycle_steps = 24
  cfg.sync.quorum = 1
  cfg.sync.max_learners = 16
  cfg.sync.num_shards = 16
  cfg.sync.lease_s = 5.0
  cfg.sync.quorum_timeout_s = 120.0
  # A silent connection is found out in four seconds.
  cfg.wire.keepalive_s = 2.0
  cfg.wire.keepalive_timeout_s = 2.0
  return cfg
