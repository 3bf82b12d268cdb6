"""A name of a fragment's bytes, to tell whether two are the same bit for bit.

It guards against mistakes, not against forgers: XXH3 reads memory many times
faster than a cryptographic hash, so that every version can have one.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash


def digest(arrays: Mapping[str, Any]) -> str:
  """Lower-case hex XXH3-128 of paths, dtypes, shapes and bytes.

  Args:
    arrays: Path -> array, on the host or on a device; in any order.
  """
  found = xxhash.xxh3_128()
  for path in sorted(arrays):
    array = np.asarray(arrays[path])
    found.update(f"{path}\t{array.dtype}\t{array.shape}\n".encode())
    found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
  return found.hexdigest()
