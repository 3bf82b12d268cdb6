"""FedOpt (arXiv 2003.00295): FedAvg whose mean is the gradient of a server.

With optax.adam it is FedAdam, with optax.yogi FedYogi. The weight of a learner
is that of Decoupled DiLoCo, tokens^2 / steps. Independent of the project on
purpose: it imports jax, numpy and optax only.
"""

import jax
import numpy as np
import optax


def fedopt(
  params,  # Flat dict, path -> array.
  grad_fn,  # (params, batch) -> gradients.
  inner,
  outer,  # optax transformations.
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

  server = outer.init(params)
  states = [inner.init(params) for _ in batches]
  for r in range(num_rounds):
    total, mean = 0.0, {k: np.zeros(np.shape(x)) for k, x in params.items()}
    for m, stream in enumerate(batches):
      local, tokens = params, 0.0
      for batch in stream[r * cycle_steps : (r + 1) * cycle_steps]:
        local, states[m] = inner_step(local, states[m], batch)
        tokens += float(num_tokens(batch))
      weight = tokens**2 / cycle_steps
      mean = {k: x + weight * np.asarray(local[k]) for k, x in mean.items()}
      total += weight
    gradient = {
      k: np.asarray(params[k] - x / total, np.float32) for k, x in mean.items()
    }
    updates, server = outer.update(gradient, server, params)
    params = optax.apply_updates(params, updates)
  return params, [params for _ in batches]
