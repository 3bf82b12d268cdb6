"""The data shards that a learner reads, one batch of each in turn."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from ddiloco_jax.learner.part import Reads
from ddiloco_jax.learner.seams import Batches
from ddiloco_jax.protocol.events import Position


class Shards:
  """Knows which batch of which shard is next.

  Args:
    make_batches: Shard -> Batches.
  """

  def __init__(self, make_batches: Callable[[int], Batches]):
    self._make_batches = make_batches
    self._batches: dict[int, Batches] = {}
    self._next: dict[int, int] = {}  # The shard to read now comes first.
    self._used_up: dict[int, int] = {}
    self._returned: dict[int, int] = {}

  def begin(self, positions: Iterable[Position]) -> None:
    """Reads these shards, from these positions, and knows of no others."""
    self._next = dict(sorted(positions))
    self._used_up, self._returned = {}, {}
    self._batches = {s: self._make_batches(s) for s in self._next}

  def save(self) -> Reads:
    """All that `restore` needs."""
    kinds = (self._next, self._used_up, self._returned)
    next_, used_up, returned = (
      tuple(Position(s, b) for s, b in kind.items()) for kind in kinds
    )
    return Reads(following=next_, used_up=used_up, returned=returned)

  def restore(self, reads: Reads) -> None:
    """Goes on from where another one was saved, in its order."""
    self._next, self._used_up = dict(reads.following), dict(reads.used_up)
    self._returned = dict(reads.returned)
    shards = (*self._next, *self._used_up)
    self._batches = {s: self._make_batches(s) for s in shards}

  def change(self, positions: Iterable[Position]) -> None:
    """Reads these shards: goes on with those that it reads already."""
    wanted = dict(sorted(positions))
    for reads in (self._next, self._used_up):
      for shard in [s for s in reads if s not in wanted]:
        self._returned[shard] = reads.pop(shard)
        del self._batches[shard]
    for shard, batch in wanted.items():
      if shard not in self._batches:
        self._returned.pop(shard, None)
        self._batches[shard] = self._make_batches(shard)
        self._next[shard] = batch

  def batch(self) -> Mapping[str, np.ndarray] | None:
    """The batch to train on now; None once the data is used up."""
    while self._next:
      shard, position = next(iter(self._next.items()))
      batch = self._batches[shard](position)
      if batch is not None:
        return batch
      self._used_up[shard] = self._next.pop(shard)
    return None

  def place(self) -> Position:
    """Where the batch to train on now lies."""
    return Position(*next(iter(self._next.items())))

  def advance(self) -> None:
    """That batch was trained on; another shard's is next."""
    shard = next(iter(self._next))
    self._next[shard] = self._next.pop(shard) + 1

  def positions(self) -> tuple[Position, ...]:
    """Per shard, the batch after the last one that was trained on."""
    reads = self._next | self._used_up
    return tuple(Position(s, b) for s, b in sorted(reads.items()))

  def covered(self) -> tuple[Position, ...]:
    """Per shard that was read since `begin`, the next batch of it."""
    return tuple(sorted((*self.positions(), *self.returned())))

  def returned(self) -> tuple[Position, ...]:
    """Per shard that was given up since `begin`, the next batch of it."""
    return tuple(Position(s, b) for s, b in sorted(self._returned.items()))
