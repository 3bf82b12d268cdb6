"""Text and tokens: a batch is a function of (seed, shard, position)."""
