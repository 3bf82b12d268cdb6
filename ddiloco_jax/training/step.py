"""The training step: a pure, jitted function of a state that it consumes.

The learning rate is read from `schedule_step`, which the step advances like its
own counter but which a caller may overwrite between steps.
(arXiv 2604.21428, Sec. 3: the inner optimizer.)
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco_jax.models import transformer
from ddiloco_jax.training import mesh as meshes
from ddiloco_jax.training.optimizer import (
  TrainConfig,
  learning_rate,
  make_optimizer,
)

Batch = dict[str, Any]  # inputs, targets int32 [B, T]; weights float32 [B, T].
Metrics = dict[str, jax.Array]


class TrainState(struct.PyTreeNode):
  """What a step consumes and returns.

  Attributes:
    step: Steps taken, int32.
    params: Nested dict of arrays.
    opt_state: The optimizer's moments, float32.
    schedule_step: Where the learning rate is read, int32; equal to `step`
      unless a caller overwrites it (a host integer will do).
    moments_age: Steps since the moments were fresh, int32.
  """

  step: Any
  params: Any
  opt_state: Any
  schedule_step: Any
  moments_age: Any


def init_state(
  model: transformer.Transformer, cfg: TrainConfig, mesh: Mesh, seed: int
) -> TrainState:
  """A fresh state; its parameters depend on the seed, not on the mesh."""

  def init():
    return _fresh(transformer.init_params(model, seed), cfg, 0)

  shape = jax.eval_shape(init)
  return jax.jit(init, out_shardings=meshes.shardings(shape, mesh))()


def blank_state(
  model: transformer.Transformer, cfg: TrainConfig, mesh: Mesh
) -> TrainState:
  """A fresh state whose parameters are zero, for whoever will overwrite them.

  Moments of every optimizer here start at zero too. Saves compiling the
  initialisation, which takes longer than that of the step.
  """
  shape = abstract_state(model, cfg, mesh)
  places = jax.tree.map(lambda x: x.sharding, shape)
  return jax.jit(
    lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape),
    out_shardings=places,
  )()


def state_from_params(
  params: Any, cfg: TrainConfig, mesh: Mesh, step: int = 0
) -> TrainState:
  """A state of given parameters with fresh moments, which re-warm.

  Args:
    params: Nested dict of arrays anywhere, host or device; they are copied.
    step: The value of `step` and `schedule_step`.
  """

  def init(params):
    # A jitted identity would hand the input itself on; the copy may be donated.
    return _fresh(jax.tree.map(jnp.copy, params), cfg, step)

  params = jax.tree.map(lambda x: np.array(x), params)
  shape = jax.eval_shape(init, params)
  return jax.jit(init, out_shardings=meshes.shardings(shape, mesh))(params)


def abstract_state(
  model: transformer.Transformer, cfg: TrainConfig, mesh: Mesh
) -> TrainState:
  """The state's shapes, dtypes and shardings, e.g. to restore into."""
  shape = jax.eval_shape(
    lambda: _fresh(transformer.init_params(model, 0), cfg, 0)
  )
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shape,
    meshes.shardings(shape, mesh),
  )


class TrainStep:
  """The jitted step (state, batch) -> (state, metrics) on a mesh."""

  def __init__(
    self,
    function: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    state: TrainState,
    mesh: Mesh,
  ):
    """Jits a function for states with the shardings of an abstract one."""
    places = meshes.shardings(state, mesh)
    self._mesh = mesh
    self._whole = NamedSharding(mesh, PartitionSpec())
    self._jitted = jax.jit(
      function,
      in_shardings=(places, NamedSharding(mesh, meshes.BATCH)),
      out_shardings=(places, self._whole),
      donate_argnums=0,
    )

  def __call__(
    self, state: TrainState, batch: Batch
  ) -> tuple[TrainState, Metrics]:
    """Consumes the state, and takes a step without waiting for it."""
    return self._jitted(*self._placed(state, batch))

  def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
    """Lowers the step for such arguments, e.g. to compile it ahead."""
    return self._jitted.lower(*self._placed(state, batch))

  def _placed(
    self, state: TrainState, batch: Batch
  ) -> tuple[TrainState, Batch]:
    # To jit a host value has another type than the same one on the mesh: it
    # would trace and compile the step once more.
    if not isinstance(state.schedule_step, jax.Array):
      index = jax.device_put(np.int32(state.schedule_step), self._whole)
      state = state.replace(schedule_step=index)
    if not isinstance(batch["inputs"], jax.Array):
      batch = meshes.place_batch(batch, self._mesh)
    return state, batch


def make_train_step(
  model: transformer.Transformer, cfg: TrainConfig, mesh: Mesh
) -> TrainStep:
  """Returns the jitted step (state, batch) -> (state, metrics).

  The state is donated: use the returned one. The batch may be of host arrays.
  Metrics are device scalars (loss in nats per token, num_tokens, grad_norm
  before clipping, learning_rate); read them once the next step is dispatched.

  Raises:
    ValueError: the mesh cannot split a part of the batch evenly.
  """
  part = cfg.batch_size // cfg.accumulate_steps
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  if part % ways:
    raise ValueError(
      f"train.batch_size / train.accumulate_steps is {part}: mesh.data * "
      f"mesh.fsdp ({ways}) must divide it; raise the batch size."
    )
  model = model.clone(place=meshes.keep_rows_apart(mesh))
  optimizer, rate = make_optimizer(cfg), learning_rate(cfg)

  def train_step(state: TrainState, batch: Batch):
    loss, num_tokens, grads = _gradient(model, cfg, state.params, batch)
    grad_norm = optax.tree.norm(grads)
    if cfg.clip_norm:
      scale = jnp.minimum(1.0, cfg.clip_norm / (grad_norm + 1e-12))
      grads = jax.tree.map(lambda g: g * scale, grads)
    params32 = _float32(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, params32)
    lr = jnp.asarray(rate(state.schedule_step, state.moments_age), jnp.float32)
    params = jax.tree.map(
      lambda old, p, u: (p - lr * u).astype(old.dtype),
      state.params,
      params32,
      updates,
    )
    metrics = {
      "loss": loss,
      "num_tokens": num_tokens,
      "grad_norm": grad_norm,
      "learning_rate": lr,
    }
    state = TrainState(
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      schedule_step=state.schedule_step + 1,
      moments_age=state.moments_age + 1,
    )
    return state, metrics

  return TrainStep(train_step, abstract_state(model, cfg, mesh), mesh)


def sum_loss(
  model: transformer.Transformer, params: Any, batch: Batch
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Returns the weighted sum of nats, and (sum of weights, tokens that count).

  All in float32 but the last, an int32.
  """
  logits_BxTxV = cast(
    jax.Array, model.apply({"params": params}, batch["inputs"])
  )
  nats_BxT = optax.softmax_cross_entropy_with_integer_labels(
    logits_BxTxV.astype(jnp.float32), batch["targets"]
  )
  weights_BxT = batch["weights"].astype(jnp.float32)
  num_tokens = jnp.sum(weights_BxT != 0, dtype=jnp.int32)
  return jnp.sum(nats_BxT * weights_BxT), (jnp.sum(weights_BxT), num_tokens)


def _gradient(
  model: transformer.Transformer, cfg: TrainConfig, params: Any, batch: Batch
):
  """Mean loss, token count and float32 gradient of a batch, part by part.

  Sums are accumulated and divided once, so that a part with few tokens weighs
  little.
  """
  part_gradient = jax.value_and_grad(
    lambda params, part: sum_loss(model, params, part), has_aux=True
  )

  def add(total, part):
    (nats, (weight, num_tokens)), grads = part_gradient(params, part)
    new = (nats, weight, num_tokens, _float32(grads))
    return jax.tree.map(jnp.add, total, new), None

  if cfg.accumulate_steps == 1:
    (nats, (weight, num_tokens)), grads = part_gradient(params, batch)
  else:
    # Rows i, i + A, ...: each part is spread over the devices as the whole is.
    parts = jax.tree.map(
      lambda x: x.reshape(-1, cfg.accumulate_steps, *x.shape[1:]).swapaxes(
        0, 1
      ),
      batch,
    )
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    start = (jnp.float32(0), jnp.float32(0), jnp.int32(0), zeros)
    (nats, weight, num_tokens, grads), _ = jax.lax.scan(add, start, parts)
  # A batch without a single token has gradient 0, not NaN.
  share = 1.0 / jnp.where(weight > 0, weight, 1.0)
  grads = jax.tree.map(lambda g: g.astype(jnp.float32) * share, grads)
  return nats * share, num_tokens, grads


def _fresh(params: Any, cfg: TrainConfig, step: int) -> TrainState:
  return TrainState(
    step=jnp.int32(step),
    params=params,
    opt_state=make_optimizer(cfg).init(_float32(params)),
    schedule_step=jnp.int32(step),
    moments_age=jnp.int32(0),
  )


def _float32(tree: Any) -> Any:
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
