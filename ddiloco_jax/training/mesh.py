"""Where arrays live: a device mesh, and the rules from tree paths to its axes.

One table names the logical axes of every parameter by its path, another maps
them to mesh axes; optimizer moments carry their parameter's path and so follow
it. (arXiv 2604.21428, Sec. 4: learners are ordinary sharded JAX programs.)
"""

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = (  # Tree path pattern -> logical axes; the first match counts.
  ("embedding", ("vocab", "embed")),
  ("head", ("embed", "vocab")),
  ("*attention/query", ("embed", "heads", None)),
  ("*attention/key", ("embed", "kv_heads", None)),
  ("*attention/value", ("embed", "kv_heads", None)),
  ("*attention/output", ("heads", None, "embed")),
  ("*mlp/gate", ("embed", "mlp")),
  ("*mlp/up", ("embed", "mlp")),
  ("*mlp/down", ("mlp", "embed")),
)
RULES = {  # Logical axis -> mesh axis.
  "embed": "fsdp",
  "vocab": "tensor",
  "heads": "tensor",
  "kv_heads": "tensor",
  "mlp": "tensor",
}
BATCH = PartitionSpec(("data", "fsdp"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
  """Devices per mesh axis.

  Attributes:
    data: Copies of the parameters, each on its own rows of the batch.
    fsdp: Splits the rows of the batch and the parameters' embed axis.
    tensor: Splits heads, hidden layers and the vocabulary.
  """

  data: int = 1
  fsdp: int = 1
  tensor: int = 1

  def __post_init__(self):
    for name in ("data", "fsdp", "tensor"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"mesh.{name} is {getattr(self, name)}: it must be at least 1."
        )


def make_mesh(cfg: MeshConfig, devices: list[Any] | None = None) -> Mesh:
  """Returns a mesh over the first data * fsdp * tensor devices.

  Raises:
    ValueError: there are fewer.
  """
  devices = jax.devices() if devices is None else devices
  shape = (cfg.data, cfg.fsdp, cfg.tensor)
  count = cfg.data * cfg.fsdp * cfg.tensor
  if len(devices) < count:
    raise ValueError(
      f"mesh (data {cfg.data}, fsdp {cfg.fsdp}, tensor {cfg.tensor}) needs "
      f"{count} devices, but there are {len(devices)}: lower an axis."
    )
  # Auto: the compiler places what we do not; make_mesh's default is Explicit.
  return jax.make_mesh(
    shape,
    ("data", "fsdp", "tensor"),
    axis_types=(AxisType.Auto,) * 3,
    devices=devices[:count],
  )


def tree_path(key_path: tuple[Any, ...]) -> str:
  """Joins the dict keys of a JAX key path with "/", leaving out the rest."""
  keys = [k.key for k in key_path if isinstance(k, jax.tree_util.DictKey)]
  return "/".join(map(str, keys))


def sharding(path: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
  """Where the array at a tree path lives.

  A dimension that its mesh axis does not divide is not split; a path without a
  rule is replicated.
  """
  axes = next(
    (axes for pattern, axes in AXES if fnmatch.fnmatchcase(path, pattern)), ()
  )
  if path.startswith("layers/"):
    axes = (None, *axes)
  if not axes or len(axes) != len(shape):
    return NamedSharding(mesh, PartitionSpec())
  spec = [RULES.get(axis) if axis else None for axis in axes]
  return NamedSharding(
    mesh,
    PartitionSpec(
      *(
        axis if axis and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(spec, shape)
      )
    ),
  )


def shardings(tree: Any, mesh: Mesh) -> Any:
  """The tree with each array replaced by where it lives.

  Args:
    tree: Parameters, or anything that holds trees of their shape: an optax
      state, a train state; arrays or ShapeDtypeStructs.
  """
  return jax.tree_util.tree_map_with_path(
    lambda key_path, x: sharding(tree_path(key_path), np.shape(x), mesh), tree
  )


def place_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
  """Splits a host batch by rows over the mesh.

  Args:
    batch: This process's rows; global rows are theirs in process order.
  """
  rows = NamedSharding(mesh, BATCH)
  return {
    name: jax.make_array_from_process_local_data(rows, x)
    for name, x in batch.items()
  }


def keep_rows_apart(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
  """A constraint for activations: rows split like the batch, the rest whole.

  Rows that the mesh does not divide are left to the compiler.
  """
  rows = NamedSharding(mesh, BATCH)
  ways = mesh.shape["data"] * mesh.shape["fsdp"]

  def place(x: jax.Array) -> jax.Array:
    if x.shape[0] % ways:
      return x
    return jax.lax.with_sharding_constraint(x, rows)

  return place
