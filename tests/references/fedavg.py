"""FedAvg, or Local SGD (arXiv 1602.05629): a weighted mean of the learners.

The weight of a learner is that of Decoupled DiLoCo, tokens^2 / steps.
Independent of the project on purpose: it imports jax, numpy and optax only.
"""

import jax
import numpy as np
import optax


def fedavg(
  params,  # Flat dict, path -> array.
  grad_fn,  # (params, batch) -> gradients.
  inner,  # An optax transformation; its state stays with the learner.
  batches,  # batches[learner][step]
  *,
  num_rounds,
  cycle_steps,
  num_tokens,  # batch -> the tokens that contribute to its loss.
):
  """Returns the global parameters and the list of every learner's."""

  @jax.jit
  def inner_step(params, state, batch):
    updates, state = inner.update(grad_fn(params, batch), state, params)
    return optax.apply_updates(params, updates), state

  states = [inner.init(params) for _ in batches]
  for r in range(num_rounds):
    ends, weights = [], []
    for m, stream in enumerate(batches):
      local, tokens = params, 0.0
      for batch in stream[r * cycle_steps : (r + 1) * cycle_steps]:
        local, states[m] = inner_step(local, states[m], batch)
        tokens += float(num_tokens(batch))
      ends.append(local)
      weights.append(tokens**2 / cycle_steps)
    shares = np.array(weights) / np.sum(weights)
    params = {
      k: sum(s * np.asarray(x[k], np.float64) for s, x in zip(shares, ends))
      for k in params
    }
    params = {k: np.asarray(x, np.float32) for k, x in params.items()}
  return params, [params for _ in batches]
