"""A model in training: owns the train state, the jitted step and its checkpoints.

In plain training the metrics of a step are read only after the next one is
dispatched, so that the device never waits for the host. A learner waits for its
step: what it copies out and puts in at a boundary is then one step fresher.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ddiloco_jax.algorithm import fragments
from ddiloco_jax.models import transformer
from ddiloco_jax.training import checkpoint, mesh, named, parts
from ddiloco_jax.training import step as steps

Record = dict[str, Any]


class Trainer:
  """Steps a train state through batches.

  Args:
    model: What is trained.
    cfg: How.
    devices: The mesh that the state and the batches are laid over.
    seed: Of the initial parameters; None where they will be overwritten.
    step_s: A step takes at least so long.
  """

  def __init__(
    self,
    model: transformer.Transformer,
    cfg: steps.TrainConfig,
    devices: Mesh,
    seed: int | None,
    step_s: float = 0.0,
  ):
    self.state = (
      steps.blank_state(model, cfg, devices)
      if seed is None
      else steps.init_state(model, cfg, devices, seed)
    )
    self._mesh = devices
    self._rate = steps.learning_rate(cfg)
    self._step = steps.make_train_step(model, cfg, devices)
    self._step_s = step_s
    self._began = time.monotonic()
    self._age = 0
    self._pending: tuple[int, steps.Metrics] | None = None
    self._last_read = time.monotonic()

  @property
  def params(self) -> dict[str, Any]:
    return self.state.params

  @property
  def moments_age(self) -> int:
    """Steps since the moments were fresh."""
    return self._age

  @property
  def mesh(self) -> Mesh:
    return self._mesh

  def warm_up(self, batch: Mapping[str, np.ndarray]) -> None:
    """Compiles the step for batches of this shape, without taking one."""
    placed = mesh.place_batch(dict(batch), self._mesh)
    self._step.lower(self.state, placed).compile()

  def step(self, batch: Mapping[str, np.ndarray], index: int) -> Record:
    """Takes a step with the learning rate at `index`, and waits for it.

    Returns:
      Its record: step, loss, num_tokens, grad_norm, learning_rate, step_s.
    """
    self.dispatch(batch, index)
    return self.last()

  def dispatch(self, batch: Mapping[str, np.ndarray], index: int) -> Record:
    """Starts a step, and waits for the one before it.

    Returns:
      The record of the step before, empty at the first.
    """
    before = self._pending
    self._began = time.monotonic()
    state = self.state.replace(schedule_step=np.int32(index))
    placed = mesh.place_batch(dict(batch), self._mesh)
    self.state, metrics = self._step(state, placed)
    self._age += 1
    self._pending = (self._age, metrics)
    return self._read(before)

  def last(self) -> Record:
    """The record of the newest step; waits for it."""
    pending, self._pending = self._pending, None
    return self._read(pending)

  def learning_rate(self, index: int) -> float:
    """The rate that the next step takes at `index`."""
    return float(self._rate(index, self._age))

  def take(self, paths: Iterable[str]) -> dict[str, jax.Array]:
    """Copies parameters by tree path; see `parts.take`."""
    return parts.take(self.state.params, paths)

  def put(self, arrays: Mapping[str, np.ndarray]) -> None:
    """Overwrites parameters by tree path; see `parts.put`."""
    params = parts.put(self.state.params, arrays)
    self.state = self.state.replace(params=params)

  def inner_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """Path -> (shape, dtype) of what `take_inner` copies."""
    return fragments.shapes_of(fragments.flatten(self._inner()))

  def take_inner(self) -> dict[str, jax.Array]:
    """Copies the optimizer's state by tree path; see `parts.take`."""
    inner = self._inner()
    return parts.take(inner, fragments.flatten(inner))

  def put_inner(self, arrays: Mapping[str, np.ndarray]) -> None:
    """Overwrites the optimizer's state by tree path; see `parts.put`."""
    inner = parts.put(self._inner(), arrays)["inner"]
    like = self.state.opt_state
    age = inner["moments_age"]
    self.state = self.state.replace(
      opt_state=named.from_dict(inner.get("opt_state", {}), like),
      moments_age=age,
    )
    self._age = int(age)

  def save(
    self,
    to: checkpoint.Checkpoints,
    at: int,
    record: Mapping[str, Any],
    beside: Mapping[str, Any] | None = None,
  ) -> None:
    """Starts an asynchronous checkpoint of the state, and of trees beside it."""
    trees = {
      **(beside or {}),
      "params": self.state.params,
      "opt_state": self.state.opt_state,
      "counters": self._counters(),
    }
    to.save(at, trees=trees, records={"progress": dict(record)})

  def restore(self, source: checkpoint.Checkpoints, at: int) -> dict[str, Any]:
    """Takes over a checkpoint's state.

    Returns:
      The record that was saved with it.
    """
    like = {
      "params": self.state.params,
      "opt_state": self.state.opt_state,
      "counters": self._counters(),
    }
    trees = source.restore(at, like)
    self.state = self.state.replace(
      params=trees["params"],
      opt_state=trees["opt_state"],
      **trees["counters"],
    )
    self._age = int(self.state.moments_age)
    return source.records(at)["progress"]

  def restore_moments(self, source: checkpoint.Checkpoints, at: int) -> None:
    """Takes over a checkpoint's optimizer state, and nothing else."""
    like = {"opt_state": self.state.opt_state, "counters": self._counters()}
    trees = source.restore(at, like)
    age = trees["counters"]["moments_age"]
    self.state = self.state.replace(
      opt_state=trees["opt_state"], moments_age=age
    )
    self._age = int(age)

  def _inner(self) -> dict[str, Any]:
    """The optimizer's state, live, as nested dicts."""
    opt_state = named.to_dict({"opt_state": self.state.opt_state})
    return {"inner": {**opt_state, "moments_age": self.state.moments_age}}

  def _counters(self) -> dict[str, Any]:
    return {
      "step": self.state.step,
      "schedule_step": self.state.schedule_step,
      "moments_age": self.state.moments_age,
    }

  def _read(self, pending: tuple[int, steps.Metrics] | None) -> Record:
    if pending is None:
      return {}
    at, metrics = pending
    values = {name: float(x) for name, x in jax.device_get(metrics).items()}
    time.sleep(max(0.0, self._began + self._step_s - time.monotonic()))
    now = time.monotonic()
    step_s, self._last_read = now - self._last_read, now
    return {"step": at, **values, "step_s": step_s}


def train(
  trainer: Trainer,
  batches: Callable[[int], Mapping[str, np.ndarray] | None],
  num_steps: int,
  at_boundary: Callable[[int, Record], bool],
  start: int = 0,
) -> int:
  """Plain training: one step after the other, nothing else.

  Args:
    batches: Position -> batch; None once the data is used up.
    at_boundary: Called with (steps taken, record of an earlier step, maybe
      empty) after each step; True ends the training.
    start: Steps taken already.

  Returns:
    Steps taken in all.
  """
  for position in range(start, num_steps):
    batch = batches(position)
    if batch is None:
      return position
    record = trainer.dispatch(batch, position)
    if at_boundary(position + 1, record):
      return position + 1
  return num_steps
