"""The paper's main setting: a dense decoder of 5 billion parameters on pods.

Command:  python -m ddiloco_jax.cli.syncer --config=configs/paper_5b.py \
            --address=0.0.0.0:8470 --run_dir=runs/paper_5b
          python -m ddiloco_jax.train --config=configs/paper_5b.py \
            --syncer=HOST:8470 --learner_id=N --run_dir=runs/paper_5b \
            --config.data.source='/data/part_N/*.array_record' \
            --config.data.tokenizer=/data/tokenizer.model
Hardware: eight learners (M = 8), each a pod slice of 256 chips as fsdp 64 x
          tensor 4; --config.mesh.fsdp and --config.mesh.tensor fit it to
          another. The syncer is CPU only, with about 250 GB of memory.
Time:     not measured here; the paper gives no hours. 119,000 steps of 8 x
          1,048,576 tokens are 1e12 tokens and 3e22 floating-point operations.
Loss:     not measured here; the paper gives benchmark scores, not losses: 69.8
          text and 58.6 vision at 1e12 tokens under failures, against 70.1 and
          58.7 data-parallel without failures (arXiv 2604.21428).
Source:   P = H = 24, tau = 2, K = 1, M = 8, AdamW inside and bfloat16 outer
          gradients are the paper's. Shape, batch and learning rates are ours:
          it does not publish them.
Data:     a process holds its text in memory, up to data.max_bytes; a learner
          that is to read its share of 1e12 tokens needs more memory or
          another source of batches.
"""

from ddiloco_jax.config import default


def get_config():
  cfg = default()
  cfg.run.name = "paper_5b"
  cfg.run.directory = "runs/paper_5b"
  cfg.run.num_steps = 119_000
  cfg.run.log_every_steps = 20
  cfg.run.checkpoint_every_s = 1_800.0
  cfg.run.checkpoint_every_steps = 1_000

  cfg.model.vocab_size = 32_768
  cfg.model.embed_dim = 4_096
  cfg.model.num_layers = 22
  cfg.model.num_heads = 32
  cfg.model.num_kv_heads = 8
  cfg.model.head_dim = 128
  cfg.model.mlp_dim = 14_336
  cfg.model.compute_dtype = "bfloat16"
  cfg.model.remat = True

  cfg.mesh.fsdp = 64
  cfg.mesh.tensor = 4

  cfg.data.max_bytes = 64 << 30

  cfg.train.batch_size = 256
  cfg.train.seq_len = 4_096
  cfg.train.learning_rate = 3e-4
  cfg.train.warmup_steps = 2_000
  cfg.train.decay_steps = 119_000
  cfg.train.rewarm_steps = 100

  cfg.evaluate.every_steps = 1_000
  cfg.evaluate.num_windows = 1_024

  cfg.sync.num_fragments = 24
  cfg.sync.cycle_steps = 24
  cfg.sync.max_open_rounds = 2
  cfg.sync.quorum = 1
  cfg.sync.alpha = 0.0
  cfg.sync.num_syncer_steps = 119_000
  cfg.sync.max_learners = 16
  cfg.sync.num_shards = 16
  cfg.wire.up_format = "bfloat16"
  return cfg
