"""An outer gradient is the base minus what a learner made of it.

It is taken against the base that the learner itself started from, so that a
stale reply holds the learner's own progress and no global drift. (arXiv
2604.21428, Sec. 3.2 and Alg. 1; 2501.18512, Eq. 3 for alpha.)
"""

import numpy as np

from ddiloco_jax.algorithm.fragments import Fragment


def delta(base: Fragment, arrays: Fragment) -> dict[str, np.ndarray]:
  """Subtracts in float32: base - arrays, of the gradient's sign.

  Args:
    base: Path -> float32 array, the version adopted last.
    arrays: Path -> the learner's array now, of any floating dtype.

  Returns:
    Path -> float32 array in memory of its own.
  """
  assert base.keys() == arrays.keys(), sorted(base.keys() ^ arrays.keys())
  result = {}
  for path, array in arrays.items():
    result[path] = np.array(base[path], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # The guard refuses it.
      result[path] -= np.asarray(array, np.float32)
  return result


def adopt(
  local: Fragment, fresh: Fragment, alpha: float
) -> dict[str, np.ndarray]:
  """Blends a publication into a learner: alpha * local + (1 - alpha) * fresh.

  Args:
    local: Path -> the learner's array; alpha 0 reads only its dtype.
    fresh: Path -> float32 array; it stays the base, and is not written.
    alpha: Share of its own value that the learner keeps, in [0, 1].

  Returns:
    Path -> array of local's dtype in memory of its own: exactly `fresh`, cast,
    for alpha 0, and exactly `local` for alpha 1.

  Raises:
    ValueError: alpha outside [0, 1].
  """
  if not 0 <= alpha <= 1:
    raise ValueError(
      f"alpha is {alpha}; it is the share of its own parameters that a learner"
      " keeps, from 0 to 1."
    )
  assert local.keys() == fresh.keys(), sorted(local.keys() ^ fresh.keys())
  result = {}
  for path, array in local.items():
    if alpha == 0:
      blend = fresh[path]
    elif alpha == 1:
      blend = array
    else:
      blend = alpha * np.asarray(array, np.float32)
      blend = blend + (1 - alpha) * np.asarray(fresh[path], np.float32)
    result[path] = np.array(blend, array.dtype)
  return result
