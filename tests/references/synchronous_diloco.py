"""Synchronous DiLoCo (arXiv 2311.08105), written from the paper.

Independent of the project on purpose: it imports jax, numpy and optax only.
"""

import jax
import numpy as np
import optax


def synchronous_diloco(
  params,  # Flat dict, path -> array.
  grad_fn,  # (params, batch) -> gradients.
  inner,
  outer,  # optax transformations.
  batches,  # batches[learner][step]
  *,
  num_rounds,
  cycle_steps,  # H
  num_tokens,  # batch -> the tokens that contribute to its loss.
  direction="rda",  # Or "average".
  averaged=(),  # Paths that are averaged whatever the direction.
):
  """Returns the global parameters and the list of every learner's."""

  @jax.jit
  def inner_step(params, state, batch):
    updates, state = inner.update(grad_fn(params, batch), state, params)
    return optax.apply_updates(params, updates), state

  theta, outer_state = params, outer.init(params)
  inner_states = [inner.init(params) for _ in batches]
  for r in range(num_rounds):
    deltas, weights = [], []
    for m, stream in enumerate(batches):
      local, tokens = theta, 0.0
      for step in range(r * cycle_steps, (r + 1) * cycle_steps):
        local, inner_states[m] = inner_step(
          local, inner_states[m], stream[step]
        )
        tokens += float(num_tokens(stream[step]))
      deltas.append({k: np.subtract(theta[k], local[k]) for k in theta})
      weights.append(tokens**2 / cycle_steps)
    gradient = {}
    for k in theta:
      combine = average if direction == "average" or k in averaged else rda
      merged = combine([d[k] for d in deltas], weights)
      gradient[k] = np.asarray(merged, np.float32)
    updates, outer_state = outer.update(gradient, outer_state, theta)
    theta = optax.apply_updates(theta, updates)
  return theta, [theta for _ in batches]


def average(vectors, weights):
  return np.average(np.array(vectors, np.float64), axis=0, weights=weights)


def rda(vectors, weights):
  vectors = np.array(vectors, np.float64)
  norms = np.sqrt([np.sum(v**2) for v in vectors])
  phi = [v / n if n > 0 else v for v, n in zip(vectors, norms)]
  mean = average(phi, weights)
  length = np.sqrt(np.sum(mean**2))
  if length < 1e-12:
    return average(vectors, weights)
  return average(norms, weights) * mean / length
