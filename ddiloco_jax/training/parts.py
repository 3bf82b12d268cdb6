"""Copies parts of a parameter tree out and puts arrays back, by tree path.

What is taken survives the donation of the tree; what is put shares no memory
with the arrays it came from.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# XLA never hands out an undonated input as its output: a copy in new memory.
# One call per array, so that shapes, not sets of paths, are compiled.
_copy = jax.jit(jnp.copy)


def take(params: dict[str, Any], paths: Iterable[str]) -> dict[str, jax.Array]:
  """Copies the arrays at some paths on their devices, without waiting.

  Args:
    params: Nested dicts of device arrays; may be donated right afterwards.
    paths: Dict keys joined by "/".

  Returns:
    path -> array of the same dtype and sharding, owned by the caller.
  """
  return {path: _copy(_leaf(params, path)) for path in paths}


def put(
  params: dict[str, Any], fresh: Mapping[str, np.ndarray]
) -> dict[str, Any]:
  """Returns the tree with some arrays replaced; the others are shared.

  Args:
    params: Nested dicts of device arrays.
    fresh: path -> array of the replaced one's shape; cast to its dtype, placed
      with its sharding. The caller may overwrite it afterwards.

  Raises:
    ValueError: a path is unknown, or a shape differs.
  """
  for path, array in fresh.items():
    old = _leaf(params, path)
    if np.shape(array) != old.shape:
      raise ValueError(
        f"{path} has shape {old.shape}, but {np.shape(array)} was put there: "
        "both sides must train one model."
      )
    # device_put may alias host memory on CPU, even if told not to: it gets a
    # host copy, and the step a device copy that it can donate.
    host = np.array(array, dtype=old.dtype)
    params = _replace(
      params, path.split("/"), _copy(jax.device_put(host, old.sharding))
    )
  return params


def _leaf(params: dict[str, Any], path: str) -> jax.Array:
  node: Any = params
  for key in path.split("/"):
    if not isinstance(node, dict) or key not in node:
      raise ValueError(
        f"there is no parameter {path!r}: {key!r} is not one of "
        f"{sorted(node) if isinstance(node, dict) else []}."
      )
    node = node[key]
  return node


def _replace(node: dict[str, Any], keys: list[str], array: jax.Array) -> dict:
  key, *rest = keys
  return {**node, key: _replace(node[key], rest, array) if rest else array}
