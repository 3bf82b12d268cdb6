"""The inner optimizer and its schedule, as settings and as optax.

The rate stays out of the optimizer: the step applies it, so that it may be read
from a step that is not the optimizer's own count. (arXiv 2604.21428, Sec. 3.)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ddiloco_jax.training import mesh as meshes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
  """How a model is trained.

  Attributes:
    batch_size: Rows of a batch, over all devices of the mesh.
    seq_len: Tokens of a row.
    learning_rate: The peak.
    warmup_steps: Steps of linear growth to the peak.
    decay_steps: The step at which the cosine ends, warm-up included; after it
      the rate stays.
    min_lr_ratio: Final over peak rate.
    rewarm_steps: Fresh moments are never met by a rate above a linear growth
      over so many steps (a restart); at most `warmup_steps` count.
    optimizer: "adamw", or "sgd" without momentum.
    b1: Decay of Adam's first moment.
    b2: Decay of Adam's second moment.
    eps: Added to the root of Adam's second moment.
    weight_decay: Decoupled, per unit of learning rate; norm scales are exempt.
    clip_norm: Bound on the gradient's global norm; 0 turns it off.
    accumulate_steps: Parts into which a batch's rows are split, one after the
      other, to save memory; the result is that of the whole batch.
  """

  batch_size: int = 8
  seq_len: int = 128
  learning_rate: float = 3e-3
  warmup_steps: int = 50
  decay_steps: int = 1000
  min_lr_ratio: float = 0.1
  rewarm_steps: int = 10
  optimizer: str = "adamw"
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  accumulate_steps: int = 1

  def __post_init__(self):
    for name in ("batch_size", "seq_len", "accumulate_steps", "decay_steps"):
      _check(self, name, getattr(self, name) >= 1, "at least 1")
    for name in ("warmup_steps", "rewarm_steps", "weight_decay", "clip_norm"):
      _check(self, name, getattr(self, name) >= 0, "at least 0")
    for name in ("learning_rate", "eps"):
      _check(self, name, getattr(self, name) > 0, "above 0")
    for name in ("b1", "b2"):
      _check(self, name, 0 <= getattr(self, name) < 1, "in [0, 1)")
    _check(self, "min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "in [0, 1]")
    known = self.optimizer in ("adamw", "sgd")
    _check(self, "optimizer", known, 'one of "adamw", "sgd"')
    _check(
      self,
      "decay_steps",
      self.decay_steps >= self.warmup_steps,
      f"at least train.warmup_steps ({self.warmup_steps})",
    )
    _check(
      self,
      "accumulate_steps",
      self.batch_size % self.accumulate_steps == 0,
      f"a divisor of train.batch_size ({self.batch_size})",
    )


def learning_rate(cfg: TrainConfig) -> Callable[..., Any]:
  """Returns (schedule_step, moments_age=None) -> rate, for ints and tracers.

  The first step of a warm-up already moves: its rate is peak / warmup_steps.
  """
  rewarm = min(cfg.rewarm_steps, cfg.warmup_steps)
  span = max(1, cfg.decay_steps - cfg.warmup_steps)

  def rate(schedule_step, moments_age=None):
    xp = jnp if isinstance(schedule_step, jax.Array) else np
    growth = (schedule_step + 1) / max(1, cfg.warmup_steps)
    progress = xp.clip((schedule_step - cfg.warmup_steps) / span, 0.0, 1.0)
    cosine = 0.5 * (1.0 + xp.cos(xp.pi * progress))
    decay = cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * cosine
    share = xp.minimum(growth, decay)
    if moments_age is not None and rewarm:
      share = xp.minimum(share, (moments_age + 1) / rewarm)
    return cfg.learning_rate * share

  return rate


def make_optimizer(cfg: TrainConfig) -> optax.GradientTransformation:
  """The chain up to, and without, the learning rate."""
  direction = {
    "adamw": lambda: optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps),
    "sgd": optax.identity,
  }[cfg.optimizer]()
  decay = optax.add_decayed_weights(cfg.weight_decay, mask=_is_decayed)
  return optax.chain(direction, decay)


def _is_decayed(params: Any) -> Any:
  return jax.tree_util.tree_map_with_path(
    lambda key_path, _: not meshes.tree_path(key_path).endswith("scale"),
    params,
  )


def _check(cfg: TrainConfig, name: str, holds: bool, rule: str) -> None:
  if not holds:
    raise ValueError(
      f"train.{name} is {getattr(cfg, name)!r}: it must be {rule}."
    )
