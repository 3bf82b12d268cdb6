"""Parameters as a file of arrays by tree path, into which no model is written."""

import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np


def load_arrays(path: str) -> dict[str, np.ndarray]:
  """Theta 0 from an .npz of arrays that are named by tree path.

  Raises:
    ValueError: the file cannot be read as one.
  """
  try:
    with zipfile.ZipFile(path) as archive:
      fault = archive.testzip()  # A flipped bit would be a parameter.
    if fault:
      raise ValueError(f"{fault} has a wrong checksum")
    with np.load(path, allow_pickle=False) as loaded:
      arrays = {name: loaded[name] for name in loaded.files}
    _check_arrays(arrays)
  except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
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
