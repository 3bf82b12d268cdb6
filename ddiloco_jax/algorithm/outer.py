"""The outer step: one optax transformation, one state per fragment.

A merged delta is a gradient (old minus new), so that any optax transformation
is an outer optimizer; the default is SGD with Nesterov momentum. Arrays are
replaced and never written: what goes in may be read on by others, which is
why nothing here is donated. (arXiv 2604.21428, Sec. 3.3; 2311.08105, Alg. 1;
2003.00295 for adam, yogi and adagrad.)
"""

import dataclasses
import difflib
import functools
from typing import Any

import jax
import numpy as np
import optax

from ddiloco_jax.algorithm.fragments import Fragment


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
  """The outer optimizer.

  Attributes:
    name: "sgd", "adam", "yogi" or "adagrad".
    learning_rate: Of the outer step.
    momentum: Of sgd; 0 keeps no momentum at all.
    nesterov: Whether sgd looks ahead by its momentum.
    b1: Decay of the first moment of adam and yogi.
    b2: Decay of the second moment of adam and yogi.
    eps: Added to the root of the second moment; None for optax's own default
      of the optimizer named.
  """

  name: str = "sgd"
  learning_rate: float = 0.7
  momentum: float = 0.5
  nesterov: bool = True
  b1: float = 0.9
  b2: float = 0.999
  eps: float | None = None


def make_outer(cfg: OuterConfig) -> optax.GradientTransformation:
  """The optax transformation that a config names.

  Raises:
    ValueError: an unknown name.
  """
  if cfg.name not in _OPTIMIZERS:
    nearest = difflib.get_close_matches(cfg.name, _OPTIMIZERS, 1, 0)[0]
    raise ValueError(
      f"outer.name is {cfg.name!r}; it is one of {', '.join(_OPTIMIZERS)}. Did"
      f" you mean {nearest!r}?"
    )
  return _OPTIMIZERS[cfg.name](cfg)


def init(tx: optax.GradientTransformation, theta: Fragment) -> Any:
  """The state of one fragment's outer optimizer.

  Args:
    theta: Path -> array; taken as float32.

  Returns:
    A pytree of numpy arrays, which `step` replaces.
  """
  with _on_cpu():
    return _to_host(tx.init(_as_float32(theta)))


def step(
  tx: optax.GradientTransformation, theta: Fragment, delta: Fragment, state: Any
) -> tuple[dict[str, np.ndarray], Any]:
  """Takes one outer step: theta - update(delta).

  Args:
    tx: Built once per run: it is compiled once per fragment shape.
    theta: Path -> float32 array; read only.
    delta: Path -> float32 array, the merged delta; read only.
    state: From `init`, the last step or a checkpoint; read only.

  Returns:
    The new theta and state, numpy arrays that nobody else writes.
  """
  assert theta.keys() == delta.keys(), sorted(theta.keys() ^ delta.keys())
  with _on_cpu():
    return _to_host(_step(tx, _as_float32(theta), _as_float32(delta), state))


@functools.partial(jax.jit, static_argnums=0)
def _step(tx, theta, delta, state):
  updates, state = tx.update(delta, state, theta)
  return optax.apply_updates(theta, updates), state


def _as_float32(fragment: Fragment) -> dict[str, np.ndarray]:
  return {path: np.asarray(x, np.float32) for path, x in fragment.items()}


def _to_host(tree: Any) -> Any:
  """Views of device memory that is dropped here, so that no step reuses it."""
  return jax.tree.map(np.asarray, tree)


def _on_cpu():
  """The syncer has no accelerator; a learner in its process may have one."""
  return jax.default_device(jax.local_devices(backend="cpu")[0])


_OPTIMIZERS = {
  "sgd": lambda cfg: optax.sgd(
    cfg.learning_rate, cfg.momentum or None, cfg.nesterov
  ),
  "adam": lambda cfg: optax.adam(
    cfg.learning_rate, cfg.b1, cfg.b2, **_eps(cfg)
  ),
  "yogi": lambda cfg: optax.yogi(
    cfg.learning_rate, cfg.b1, cfg.b2, **_eps(cfg)
  ),
  "adagrad": lambda cfg: optax.adagrad(cfg.learning_rate, **_eps(cfg)),
}


def _eps(cfg: OuterConfig) -> dict[str, Any]:
  return {} if cfg.eps is None else {"eps": cfg.eps}
