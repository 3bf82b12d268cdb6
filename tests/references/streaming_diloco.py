"""Streaming DiLoCo (arXiv 2501.18512), written from the paper.

All learners step together. Fragment p is copied after step t when t mod H is
floor(p * H / P); what is merged from the copies is adopted `delay_steps`
later, blended by alpha. Independent of the project on purpose: it imports jax,
numpy and optax only.
"""

import jax
import numpy as np
import optax


def streaming_diloco(
  params,  # Flat dict, path -> array.
  grad_fn,  # (params, batch) -> gradients.
  inner,
  outer,  # optax transformations; the outer one has a state per fragment.
  batches,  # batches[learner][step]
  *,
  num_steps,
  cycle_steps,  # H
  fragments,  # The paths of each fragment.
  num_tokens,  # batch -> the tokens that contribute to its loss.
  delay_steps=0,  # tau: steps from a copy to the adoption of its merge.
  alpha=0.0,
  direction="rda",  # Or "average".
  averaged=(),  # Paths that are averaged whatever the direction.
  flush=False,  # End with a merge of what is left, adopted with alpha 0.
):
  """Returns the global parameters and the list of every learner's."""
  num_fragments = len(fragments)
  assert 0 <= delay_steps < cycle_steps
  assert sorted(k for paths in fragments for k in paths) == sorted(params)

  @jax.jit
  def inner_step(params, state, batch):
    updates, state = inner.update(grad_fn(params, batch), state, params)
    return optax.apply_updates(params, updates), state

  theta = dict(params)  # The newest global values.
  base = dict(params)  # Those that the learners adopted last.
  outer_states = [
    outer.init({k: params[k] for k in paths}) for paths in fragments
  ]
  local = [dict(params) for _ in batches]
  inner_states = [inner.init(params) for _ in batches]
  steps = [0] * num_fragments  # Since the adoption; as for the tokens.
  tokens = [[0.0] * num_fragments for _ in batches]
  adopt_at = [-1] * num_fragments

  def merge(p):
    weights = [counted[p] ** 2 / steps[p] for counted in tokens]
    gradient = {}
    for k in fragments[p]:
      combine = average if direction == "average" or k in averaged else rda
      merged = combine([np.subtract(base[k], x[k]) for x in local], weights)
      gradient[k] = np.asarray(merged, np.float32)
    old = {k: theta[k] for k in fragments[p]}
    updates, outer_states[p] = outer.update(gradient, outer_states[p], old)
    theta.update(optax.apply_updates(old, updates))

  def adopt(p, alpha):
    for k in fragments[p]:
      base[k] = theta[k]
      for x in local:
        x[k] = alpha * x[k] + (1 - alpha) * theta[k] if alpha else theta[k]
    steps[p] = 0
    adopt_at[p] = -1
    for counted in tokens:
      counted[p] = 0.0

  for t in range(1, num_steps + 1):
    for m, stream in enumerate(batches):
      batch = stream[t - 1]
      local[m], inner_states[m] = inner_step(local[m], inner_states[m], batch)
      tokens[m] = [n + float(num_tokens(batch)) for n in tokens[m]]
    steps = [n + 1 for n in steps]
    for p in range(num_fragments):
      if t % cycle_steps == p * cycle_steps // num_fragments:
        merge(p)
        adopt_at[p] = t + delay_steps
      if adopt_at[p] == t:
        adopt(p, alpha)
  if flush:
    for p in range(num_fragments):
      if steps[p] and adopt_at[p] < 0:  # Not merged already from this base.
        merge(p)
      adopt(p, 0.0)
  return theta, local


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
