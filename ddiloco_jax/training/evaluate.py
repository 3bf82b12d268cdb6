"""Held-out loss: nats per token of given parameters over given windows.

Sums are kept over windows and divided once, so the split of the windows into
batches does not matter. (arXiv 2604.21428, Sec. 4.)
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ddiloco_jax.models import transformer
from ddiloco_jax.training import mesh as meshes
from ddiloco_jax.training import step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
  """When, and on how much.

  Attributes:
    every_steps: Steps between evaluations; 0 for none.
    num_windows: Held-out windows of `seq_len` tokens, the same for everybody.
  """

  every_steps: int = 100
  num_windows: int = 64

  def __post_init__(self):
    if self.every_steps < 0:
      raise ValueError(
        f"evaluate.every_steps is {self.every_steps}: it must be at least 0 "
        "(0 for no evaluation)."
      )
    if self.num_windows < 1:
      raise ValueError(
        f"evaluate.num_windows is {self.num_windows}: it must be at least 1."
      )


class HeldOut(NamedTuple):
  """A held-out result: nats per token, and the tokens it is a mean over."""

  loss: float
  num_tokens: int


def make_evaluate(
  model: transformer.Transformer, mesh: Mesh | None = None
) -> Callable[[Any, Iterable[step.Batch]], HeldOut]:
  """Returns evaluate(params, batches), jitted once per shape of a batch.

  Args:
    model: What the parameters belong to.
    mesh: The mesh that the parameters are sharded over, if any: rows are then
      split over it where they can be. Without it, parameters may lie anywhere.
  """
  if mesh is not None:
    model = model.clone(place=meshes.keep_rows_apart(mesh))
  sum_loss = jax.jit(lambda params, batch: step.sum_loss(model, params, batch))

  def evaluate(params: Any, batches: Iterable[step.Batch]) -> HeldOut:
    # All batches are dispatched before the first result is waited for.
    sums = [sum_loss(params, batch) for batch in batches]
    nats = sum(float(nats) for nats, _ in sums)
    weight = sum(float(weight) for _, (weight, _) in sums)
    if not weight:
      raise ValueError(
        "there is no held-out token to evaluate on: raise "
        "evaluate.num_windows, or give the data more held-out text."
      )
    return HeldOut(nats / weight, sum(int(tokens) for _, (_, tokens) in sums))

  return evaluate
