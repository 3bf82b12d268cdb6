"""Parameters as a file of arrays by tree path, into which no model is written."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ddiloco_jax.syncer.payloads import read_npz


def load_arrays(path: str) -> dict[str, np.ndarray]:
  """Theta 0 from an .npz of arrays that are named by tree path.

  Raises:
    ValueError: the file cannot be read as one.
  """
  try:
    arrays = read_npz(path)
    _check_arrays(arrays)
  except ValueError as error:
    raise ValueError(
      f"--layout_arrays={path}: {error}. It must be an .npz file of finite"
      " floating arrays, named by tree path, as numpy.savez writes it."
    ) from error
  return arrays


def save_arrays(path: Path, parts: Iterable[Mapping[str, np.ndarray]]) -> None:
  """Writes fragments as one .npz that `load_arrays` reads."""
  path.parent.mkdir(parents=True, exist_ok=True)
  arrays = {name: array for part in parts for name, array in part.items()}
  with path.open("wb") as file:
    np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def _check_arrays(arrays: Mapping[str, Any]) -> None:
  if not arrays:
    raise ValueError("it has no arrays")
  for name, array in arrays.items():
    if not isinstance(array, np.ndarray):
      raise ValueError(f"{name!r} is no array")
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name!r} is of {array.dtype}")
    if not np.isfinite(array).all():
      raise ValueError(f"{name!r} has elements that are not finite")
