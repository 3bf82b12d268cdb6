"""A JAX trainer of a few lines: any gradient, any inner optax optimizer."""

import jax
import numpy as np
import optax


class Functional:
  """Implements what the learner's loop asks of a trainer.

  Args:
    params: Path -> array.
    grad_fn: (params, batch) -> gradients.
    inner: An optax transformation; its state survives adoptions.
  """

  def __init__(self, params, grad_fn, inner):
    self.params = {k: np.asarray(x) for k, x in params.items()}
    self._state = inner.init(self.params)

    @jax.jit
    def step(params, state, batch):
      updates, state = inner.update(grad_fn(params, batch), state, params)
      return optax.apply_updates(params, updates), state

    self._step = step

  def step(self, batch, index):
    arrays = {k: x for k, x in batch.items() if k != "weights"}
    self.params, self._state = self._step(self.params, self._state, arrays)
    return {}

  def learning_rate(self, index):
    return 1.0

  def take(self, paths):
    return {path: np.array(self.params[path]) for path in paths}

  def put(self, arrays):
    self.params = self.params | {k: np.array(x) for k, x in arrays.items()}
