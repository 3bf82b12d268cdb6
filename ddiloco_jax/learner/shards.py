"""The data shards that a learner reads, one batch of each in turn."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

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

  def begin(self, positions: Iterable[Position]) -> None:
    """Reads these shards from now on, from these positions."""
    self._next = dict(sorted(positions))
    self._batches = {s: self._make_batches(s) for s in self._next}

  def batch(self) -> Mapping[str, np.ndarray] | None:
    """The batch to train on now; None once the data is used up."""
    shard, position = next(iter(self._next.items()))
    return self._batches[shard](position)

  def place(self) -> Position:
    """Where the batch to train on now lies."""
    return Position(*next(iter(self._next.items())))

  def advance(self) -> None:
    """That batch was trained on; another shard's is next."""
    shard = next(iter(self._next))
    self._next[shard] = self._next.pop(shard) + 1

  def positions(self) -> tuple[Position, ...]:
    """Per shard, the batch after the last one that was trained on."""
    return tuple(Position(s, b) for s, b in sorted(self._next.items()))
