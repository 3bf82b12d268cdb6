"""A config file for real processes: a model of a few thousand parameters."""

from ddiloco_jax.config import default


def get_config():
  cfg = default()
  cfg.run.name = "small"
  cfg.run.log_every_steps = 1
  cfg.run.checkpoint_every_s = 1000.0
  cfg.run.connect_timeout_s = 60.0
  cfg.run.max_solo_s = 60.0

  cfg.model.embed_dim = 16
  cfg.model.num_layers = 1
  cfg.model.num_heads = 2
  cfg.model.num_kv_heads = 2
  cfg.model.head_dim = 8
  cfg.model.mlp_dim = 32

  cfg.data.max_bytes = 1 << 19
  cfg.train.batch_size = 4
  cfg.train.seq_len = 32
  cfg.train.learning_rate = 4e-3
  cfg.train.warmup_steps = 26
  cfg.train.decay_steps = 1000
  cfg.evaluate.num_windows = 16

  cfg.sync.num_fragments = 4
  cfg.sync.cycle_steps = 8
  cfg.sync.max_learners = 4
  cfg.sync.num_shards = 4
  cfg.sync.lease_s = 10.0
  cfg.sync.flush_s = 5.0
  cfg.sync.acknowledge_s = 10.0
  return cfg
