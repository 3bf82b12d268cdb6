"""What the training loop is given: a trainer and batches, as types.

The loop needs no more of a model than to step it, copy fragments out and put
fragments in; JAX stays behind this line. (arXiv 2604.21428, Sec. 3.)
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from ddiloco_jax.algorithm.fragments import Fragment


class Trainer(Protocol):
  """What the loop asks of a model in training; it owns the train state."""

  def step(
    self, batch: Mapping[str, np.ndarray], index: int
  ) -> Mapping[str, float]:
    """Takes one step with the learning rate at `index`, and waits for it.

    Returns:
      Its metrics.
    """
    ...

  def learning_rate(self, index: int) -> float:
    """The rate that the next step takes at `index`."""
    ...

  def take(self, paths: Iterable[str]) -> Fragment:
    """Fresh copies of parameters; reading them may wait for the device."""
    ...

  def put(self, arrays: Mapping[str, np.ndarray]) -> None:
    """Overwrites parameters with copies of the arrays."""

  def inner_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """Path -> (shape, dtype) of the inner optimizer's state; may be empty."""
    ...

  def take_inner(self) -> Mapping[str, Any]:
    """Fresh copies of that state, by the same paths."""
    ...

  def put_inner(self, arrays: Mapping[str, np.ndarray]) -> None:
    """Overwrites all of that state with copies of the arrays."""


# Batch index -> batch of one shard; None once the data is used up.
Batches = Callable[[int], Mapping[str, np.ndarray] | None]
