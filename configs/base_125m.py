"""A dense decoder of 124 million parameters, for a few single GPUs.

Command:  python -m ddiloco_jax.cli.syncer --config=configs/base_125m.py \
            --address=0.0.0.0:8470 --run_dir=runs/base_125m
          python -m ddiloco_jax.train --config=configs/base_125m.py \
            --syncer=HOST:8470 --learner_id=N --run_dir=runs/base_125m \
            --config.data.source='/data/*.jsonl' \
            --config.data.tokenizer=/data/tokenizer.json
          The tokenizer may have up to 50,304 ids. Without the last two flags it
          trains on the standard library's bytes, which only shows that it runs.
Hardware: four learners, each one accelerator of 80 GB; the syncer needs no
          accelerator, and about 4 GB of host memory.
Time:     not measured here. 9,500 steps of 4 x 65,536 tokens are 2.5 billion
          tokens, 20 a parameter, and 1.9e18 floating-point operations: about
          an hour and a quarter on four chips that sustain 1e14 a second each.
Loss:     not measured here. The fit of arXiv 2203.15556 (App. D.3, Approach 3)
          gives 3.37 nats per token of its own tokenizer at this size and so
          many tokens.
Data:     a process holds its text in memory, up to data.max_bytes.
"""

from ddiloco_jax.config import default


def get_config():
  cfg = default()
  cfg.run.name = "base_125m"
  cfg.run.directory = "runs/base_125m"
  cfg.run.num_steps = 9_500
  cfg.run.log_every_steps = 20
  cfg.run.checkpoint_every_s = 600.0
  cfg.run.checkpoint_every_steps = 1_000

  cfg.model.vocab_size = 50_304
  cfg.model.embed_dim = 768
  cfg.model.num_layers = 12
  cfg.model.num_heads = 12
  cfg.model.num_kv_heads = 12
  cfg.model.head_dim = 64
  cfg.model.mlp_dim = 2_048
  cfg.model.tie_embeddings = True
  cfg.model.compute_dtype = "bfloat16"
  cfg.model.remat = True

  cfg.data.max_bytes = 8 << 30

  cfg.train.batch_size = 64
  cfg.train.seq_len = 1_024
  cfg.train.learning_rate = 6e-4
  cfg.train.warmup_steps = 500
  cfg.train.decay_steps = 9_500
  cfg.train.rewarm_steps = 50

  cfg.evaluate.every_steps = 500
  cfg.evaluate.num_windows = 256

  cfg.sync.num_syncer_steps = 9_500
  cfg.sync.max_learners = 8
  cfg.sync.num_shards = 8
  return cfg
