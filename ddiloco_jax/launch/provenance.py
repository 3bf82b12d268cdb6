"""What a replay compares first: where a run's numbers were made, and from what.

The same arithmetic gives the same bits on one machine type with one set of
libraries, and may differ in the last ones elsewhere.
"""

import importlib.metadata
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ddiloco_jax.syncer.merger import Tensors

_LIBRARIES = ("jax", "jaxlib", "numpy", "optax", "flax")
_CPU_INFO = pathlib.Path("/proc/cpuinfo")


def machine_type() -> str:
  """The kind of host, as its system names it."""
  name = platform.processor()
  if _CPU_INFO.exists():  # Linux; `platform` knows no model there.
    for line in _CPU_INFO.read_text().splitlines():
      if line.startswith("model name"):
        name = line.partition(":")[2].strip()
        break
  return f"{platform.machine()} {name}".strip()


def libraries() -> dict[str, str]:
  """Versions of the libraries that do the arithmetic."""
  return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def differences(machine: str, versions: Mapping[str, str]) -> tuple[str, ...]:
  """How a record's machine type and libraries differ from those here."""
  pairs = [("machine type", machine, machine_type())]
  here = libraries()
  pairs += [(name, was, here.get(name, "")) for name, was in versions.items()]
  return tuple(
    f"{name} was {was!r} and is {now!r} here: last bits may differ"
    for name, was, now in pairs
    if was and was != now
  )


def name_tensors(tensors: Tensors) -> dict[str, np.ndarray]:
  """Tensors as arrays by name, for a file."""
  named = {}
  for p, (theta, state) in enumerate(zip(tensors.theta, tensors.outer)):
    named |= {f"theta:{p}:{path}": array for path, array in theta.items()}
    named |= {f"outer:{p}:{i}": array for i, array in outer_leaves(state)}
  return named


def named(
  arrays: Mapping[str, np.ndarray], what: str
) -> dict[int, dict[str, np.ndarray]]:
  """The arrays of "theta" or "outer" by fragment, out of `name_tensors`."""
  found: dict[int, dict[str, np.ndarray]] = {}
  for name, array in arrays.items():
    kind, p, path = name.split(":", 2)
    if kind == what:
      found.setdefault(int(p), {})[path] = array
  return found


def outer_leaves(state: Any) -> list[tuple[str, np.ndarray]]:
  """The arrays of an outer state, in the order of its tree."""
  leaves = jax.tree.leaves(state)
  return [(str(i), np.asarray(leaf)) for i, leaf in enumerate(leaves)]
