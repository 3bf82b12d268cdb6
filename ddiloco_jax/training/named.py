"""Trees of any kind as nested dicts, named by their own keys, fields and indices.

A tree that is nested dicts already stays as it is; nodes without arrays (optax's
EmptyState) vanish, and come back from the tree that one restores into.
"""

from typing import Any

import jax
import numpy as np


def to_dict(tree: Any) -> dict[str, Any]:
  """Nested dicts with the same arrays; nodes without arrays vanish."""
  root: dict[str, Any] = {}
  for key_path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    if not key_path:
      raise ValueError(
        f"a checkpoint's tree is a bare {type(leaf).__name__}: give it a name, "
        'like {"value": array}.'
      )
    *parents, last = map(_key, key_path)
    node = root
    for key in parents:
      node = node.setdefault(key, {})
    assert last not in node, f"two arrays at {key_path}"
    node[last] = leaf
  return root


def from_dict(found: dict[str, Any], like: Any) -> Any:
  """The arrays of `to_dict(like)`, found there, in the structure of `like`."""
  paths, structure = jax.tree_util.tree_flatten_with_path(like)
  leaves = []
  for key_path, _ in paths:
    node: Any = found
    for key in map(_key, key_path):
      node = node[key]
    leaves.append(node)
  return jax.tree_util.tree_unflatten(structure, leaves)


def describe(tree: dict[str, Any]) -> list[list[Any]]:
  """Returns [keys, dtype, shape] of each array, in JAX's order."""
  return [
    [[_key(k) for k in key_path], np.dtype(leaf.dtype).name, [*leaf.shape]]
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  ]


def numpy_like(leaves: list[list[Any]]) -> dict[str, Any]:
  """What `describe` saw, as nested dicts of numpy arrays without memory."""
  root: dict[str, Any] = {}
  for (*parents, last), dtype, shape in leaves:
    node = root
    for key in parents:
      node = node.setdefault(key, {})
    node[last] = np.broadcast_to(np.zeros((), np.dtype(dtype)), shape)
  return root


def difference(
  ours: list[list[Any]], theirs: list[list[Any]]
) -> tuple[str, str, str] | None:
  """The first path at which two descriptions differ, and what each has there."""
  one, other = (
    {"/".join(keys): f"{dtype} {tuple(shape)}" for keys, dtype, shape in side}
    for side in (ours, theirs)
  )
  for path in sorted({*one, *other}):
    if one.get(path) != other.get(path):
      return path, one.get(path, "nothing"), other.get(path, "nothing")
  return None


def _key(entry: Any) -> str:
  """The name of one step down a tree: a dict key, a field or an index."""
  for field in ("key", "name", "idx"):
    if hasattr(entry, field):
      return str(getattr(entry, field))
  raise ValueError(f"a checkpoint cannot name the tree key {entry!r}.")
