"""placeholder"""

from ddiloco_jax.config import default


def get_config():
  cfg = default()
  cfg.model.embed_dim = 64
  cfg.model.num_layers = 4
  cfg.model.num_heads = 4
  cfg.model.num_kv_heads = 2
  cfg.model.head_dim = 16
  cfg.model.mlp_dim = 192
  return cfg
