"""A batch is a pure function of (seed, shard, position).

So a data position is one integer, a resume needs nothing else, and shards are
disjoint whatever their readers do. (arXiv 2604.21428, Sec. 5 and App. E.)

Documents are joined into one stream of tokens; example i is the window of
seq_len + 1 tokens that starts at i * seq_len, so every token is a target once.
Shard s holds the examples i with i mod num_shards == s, in an order that grain
draws anew for each epoch.
"""

import dataclasses
import functools
import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddiloco_jax.data import sources, tokens
from ddiloco_jax.data.sources import DataConfig

if TYPE_CHECKING:
  import grain

Batch = dict[str, np.ndarray]


class Exhausted(Exception):
  """A shard has been read `data.num_epochs` times."""


class Corpus(NamedTuple):
  """A source as token streams, read once per process.

  Attributes:
    training: ids [num_tokens]; read only.
    held_out: ids [num_tokens] of the held-out documents; read only.
    vocab_size: Ids are below this.
    separator: The id between documents.
    digest: SHA-256 of the text, for the run's record.
  """

  training: np.ndarray
  held_out: np.ndarray
  vocab_size: int
  separator: int
  digest: str


@functools.lru_cache(maxsize=4)
def load_corpus(cfg: DataConfig) -> Corpus:
  """Reads, splits and tokenizes a source; the same value for equal settings.

  Raises:
    ValueError: the text or the tokenizer cannot be used; says why.
  """
  tokenizer = tokens.make_tokenizer(cfg.tokenizer)
  documents = sources.read_documents(cfg)
  parts = sources.split_held_out(documents, cfg.held_out_every)
  training, held_out = (tokens.join(tokenizer, part) for part in parts)
  training.flags.writeable = held_out.flags.writeable = False
  return Corpus(
    training=training,
    held_out=held_out,
    vocab_size=tokenizer.vocab_size,
    separator=tokenizer.separator,
    digest=sources.digest(documents),
  )


def vocab_size(cfg: DataConfig) -> int:
  """The least vocabulary that a model of this data must have."""
  return tokens.make_tokenizer(cfg.tokenizer).vocab_size


@dataclasses.dataclass(frozen=True, slots=True)
class Batches:
  """The batches of one shard, by position. Made by `make_batches`."""

  num_batches: int | None  # Until the shard is exhausted; None: endless.
  _windows: "Windows"
  _ids: "grain.MapDataset"
  _shard: int

  def __call__(self, position: int) -> Batch:
    """The batch at a position.

    Args:
      position: From 0; neither order nor repetition matters.

    Returns:
      inputs and targets int32 [B, T], weights float32 [B, T] (1 where a target
      counts, 0 on padding); the caller owns them.

    Raises:
      Exhausted: the shard's epochs end before this position.
    """
    return self._windows.take(self.example_ids(position))

  def example_ids(self, position: int) -> np.ndarray:
    """The ids [B] of the examples in the batch at a position.

    Raises:
      Exhausted: the shard's epochs end before this position.
    """
    if position < 0:
      raise ValueError(f"position={position} is negative; positions start at 0")
    if self.num_batches is not None and position >= self.num_batches:
      raise Exhausted(
        f"shard {self._shard} has {self.num_batches} batches and position "
        f"{position} was asked for: data.num_epochs passes are used up."
      )
    return np.asarray(self._ids[position])


def make_batches(
  cfg: DataConfig,
  seed: int,
  shard: int,
  num_shards: int,
  batch_size: int,
  seq_len: int,
) -> Batches:
  """The batches of one shard of the training text.

  Args:
    cfg: The data's settings.
    seed: Draws the order within the shard; the examples of a shard do not
      depend on it.
    shard: 0 <= shard < num_shards.
    num_shards: Disjoint parts of the text, of equal size up to one example.
    batch_size: B, examples in a batch.
    seq_len: T, targets in an example.

  Raises:
    ValueError: settings that cannot be met; says which and how.
  """
  import grain  # Deferred: it loads JAX, and only the order needs it.

  if not 0 <= shard < num_shards:
    raise ValueError(
      f"shard={shard} of num_shards={num_shards}: a shard must be at least 0 "
      "and below num_shards; raise sync.num_shards."
    )
  windows = training_windows(cfg, seq_len)
  in_shard = len(range(shard, windows.num_windows, num_shards))
  if in_shard < batch_size:
    raise ValueError(
      f"{windows.num_tokens} training tokens give shard {shard} of "
      f"{num_shards} only {in_shard} windows of {seq_len} tokens; a batch "
      f"needs {batch_size}: give more text, or fewer sync.num_shards."
    )
  ids = (
    grain.MapDataset.range(shard, windows.num_windows, num_shards)
    .shuffle(seed=_shard_seed(seed, shard))
    .repeat(cfg.num_epochs)
    .batch(batch_size, drop_remainder=True)
  )
  endless = cfg.num_epochs is None
  return Batches(None if endless else len(ids), windows, ids, shard)


def training_windows(cfg: DataConfig, seq_len: int) -> "Windows":
  """All windows of the training text, of which shards are made.

  Raises:
    ValueError: settings that cannot be met; says which and how.
  """
  corpus = load_corpus(cfg)
  return Windows("training", corpus.training, seq_len, corpus.separator)


def held_out(
  cfg: DataConfig, seq_len: int, num_windows: int, batch_size: int = 8
) -> tuple[Batch, ...]:
  """A fixed sample of the held-out text, the same for everybody.

  Args:
    cfg: The data's settings.
    seq_len: T.
    num_windows: Windows to take, spread evenly; all of them if fewer exist.
    batch_size: Rows in a batch; the last is filled with rows without weight.

  Returns:
    Batches as `Batches` gives them.
  """
  corpus = load_corpus(cfg)
  windows = Windows("held-out", corpus.held_out, seq_len, corpus.separator)
  count = min(num_windows, windows.num_windows)
  ids = np.arange(count) * windows.num_windows // count
  batches = []
  for start in range(0, count, batch_size):
    rows = ids[start : start + batch_size]
    batch = windows.take(np.resize(rows, batch_size))
    batch["weights"][len(rows) :] = 0
    batches.append(batch)
  return tuple(batches)


def bigram_entropy(cfg: DataConfig) -> float:
  """Nats per token of the held-out text under its own bigram table.

  The table is counted on the very text that it is judged on, so no bigram
  model does better on it: whoever is below has learned more than bigrams.
  """
  ids = load_corpus(cfg).held_out.astype(np.int64)
  pairs = ids[:-1] * (int(ids.max()) + 1) + ids[1:]
  _, joint = np.unique(pairs, return_counts=True)
  _, marginal = np.unique(ids[:-1], return_counts=True)
  num_pairs = len(pairs)
  total = (marginal * np.log(marginal)).sum() - (joint * np.log(joint)).sum()
  return float(total / num_pairs)


class Windows:
  """A token stream as overlapping windows; the last one is padded.

  Attributes:
    num_tokens: Of the stream.
    num_windows: Of seq_len targets each.
  """

  def __init__(
    self, name: str, stream: np.ndarray, seq_len: int, separator: int
  ):
    self.num_tokens = len(stream)
    self._num_targets = len(stream) - 1
    self.num_windows = -(-self._num_targets // seq_len)
    if self._num_targets < seq_len:
      raise ValueError(
        f"{len(stream)} {name} tokens do not fill one window of seq_len + 1 = "
        f"{seq_len + 1}: give more text, or a shorter seq_len."
      )
    padding = self.num_windows * seq_len + 1 - len(stream)
    padded = np.pad(stream, (0, padding), constant_values=separator)
    view = np.lib.stride_tricks.sliding_window_view(padded, seq_len + 1)
    self._rows = view[::seq_len]
    self._offsets = np.arange(seq_len)
    self._seq_len = seq_len

  def take(self, ids: np.ndarray) -> Batch:
    """The batch of some windows; see `Batches.__call__`."""
    rows = self._rows[ids].astype(np.int32)
    places = ids[:, None] * self._seq_len + self._offsets
    return {
      "inputs": rows[:, :-1].copy(),
      "targets": rows[:, 1:].copy(),
      "weights": (places < self._num_targets).astype(np.float32),
    }


def _shard_seed(seed: int, shard: int) -> int:
  # grain adds the epoch to the seed: a hash keeps neighbours' orders apart.
  text = hashlib.sha256(f"{seed}/{shard}".encode()).digest()
  return int.from_bytes(text[:4], "little")
