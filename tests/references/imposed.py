"""The receipts of a run, imposed on arithmetic that is written apart.

Who stepped, copied, adopted and was merged when is given; what the numbers then
must be is computed here, one learner after the other, with jax and optax alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def make_step(loss, cfg):
  """(params, moments, batch, index, age) -> (params, moments), as AdamW.

  Args:
    loss: (params, batch) -> mean nats per token; params: path -> array.
    cfg: learning_rate, warmup_steps, decay_steps, min_lr_ratio, rewarm_steps,
      b1, b2, eps, weight_decay, clip_norm.
  """
  cosine = optax.cosine_decay_schedule(
    1.0, cfg.decay_steps - cfg.warmup_steps, cfg.min_lr_ratio
  )
  rewarm = min(cfg.rewarm_steps, cfg.warmup_steps)
  inner = optax.chain(
    optax.clip_by_global_norm(cfg.clip_norm),
    optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps),
    optax.add_decayed_weights(
      cfg.weight_decay, lambda ps: {p: not p.endswith("scale") for p in ps}
    ),
  )

  @jax.jit
  def step(params, moments, batch, index, age):
    grads = jax.grad(loss)(params, batch)
    updates, moments = inner.update(grads, moments, params)
    shares = (
      (index + 1) / cfg.warmup_steps,
      cosine(jnp.maximum(index - cfg.warmup_steps, 0)),
      (age + 1) / rewarm,
    )
    rate = cfg.learning_rate * jnp.min(jnp.stack(shares))
    params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
    return params, moments

  return step, inner.init


def rda(deltas, weights, average_paths):
  """Radial-directional average of path -> array mappings, tensor by tensor."""
  total = sum(weights)
  merged = {}
  for path in deltas[0]:
    vs = [np.asarray(d[path], np.float64) for d in deltas]
    if path in average_paths:
      merged[path] = sum(w * v for w, v in zip(weights, vs)) / total
      continue
    norms = [np.linalg.norm(v) for v in vs]
    direction = sum(w * v / n for w, v, n in zip(weights, vs, norms) if n > 0)
    norm = sum(w * n for w, n in zip(weights, norms)) / total
    length = np.linalg.norm(direction)
    merged[path] = norm * direction / length if length else 0.0 * direction
  return merged


class Walker:
  """One learner process, walked forward step by step.

  Args:
    adoptions: Boundary -> list of (fragment, n), in order.
    copies: Set of (boundary, fragment) whose delta is wanted.
    batch_of: Own step -> batch.
    given: Boundaries at which others took its moments.
    donor: (walker, boundary) whose moments it began with; None: fresh ones.
  """

  def __init__(
    self, params, step, init, adoptions, copies, batch_of, given, donor=None
  ):
    self.params, self.moments, self._age = dict(params), init(params), 0
    self._step, self._given, self._donor = step, given, donor
    self._adoptions, self._copies, self._batch_of = adoptions, copies, batch_of
    self._bases, self._deltas, self._inner, self.boundary = {}, {}, {}, 0

  def delta(self, boundary, fragment, versions, paths):
    """base - theta of a fragment at a boundary, before it adopts there."""
    self._walk(boundary, versions, paths)
    return self._deltas[boundary, fragment]

  def inner(self, boundary, versions, paths):
    """(moments, their age) at a boundary."""
    self._walk(boundary, versions, paths)
    return self._inner[boundary]

  def _walk(self, boundary, versions, paths):
    if self._donor:
      (walker, at), self._donor = self._donor, None
      self.moments, self._age = walker.inner(at, versions, paths)
    while self.boundary < boundary:
      self._adopt(versions)
      self.params, self.moments = self._step(
        self.params,
        self.moments,
        self._batch_of(self.boundary),
        self.boundary,
        self._age,
      )
      self.boundary += 1
      self._age += 1
      if self.boundary in self._given:
        self._inner[self.boundary] = self.moments, self._age
      for p in [p for b, p in self._copies if b == self.boundary]:
        self._deltas[self.boundary, p] = {
          path: np.asarray(self._bases[p][path] - self.params[path])
          for path in paths[p]
        }

  def _adopt(self, versions):
    for p, n in self._adoptions.get(self.boundary, ()):
      self._bases[p] = versions[p, n]
      self.params |= {k: jnp.asarray(v) for k, v in versions[p, n].items()}


def impose(params, paths, walkers, merges, outer, average_paths):
  """Theta after every merge.

  Args:
    params: Theta 0, path -> array.
    paths: Fragment -> its paths.
    walkers: Process -> Walker.
    merges: (fragment, n, [(process, boundary, weight)]) in order.
    outer: optax transformation, one state per fragment.

  Returns:
    (fragment, n) -> path -> array.
  """
  versions = {(p, 0): {k: params[k] for k in ps} for p, ps in paths.items()}
  states = {p: outer.init(versions[p, 0]) for p in paths}
  for p, n, inputs in merges:
    deltas = [
      walkers[who].delta(boundary, p, versions, paths)
      for who, boundary, _ in inputs
    ]
    merged = rda(deltas, [w for _, _, w in inputs], average_paths)
    merged = {k: np.asarray(v, np.float32) for k, v in merged.items()}
    theta = versions[p, n - 1]
    updates, states[p] = outer.update(merged, states[p], theta)
    fresh = optax.apply_updates(theta, updates)
    versions[p, n] = {k: np.asarray(v) for k, v in fresh.items()}
  return versions
