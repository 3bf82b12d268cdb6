"""Many outer gradients become one: by average, or by radial-directional
averaging (RDA).

RDA gives the mean direction the mean length, so that the outer step does not
shrink as learners are added. Replies are summed in float32 as they come, in
the order of acceptance; norms are summed in float64. (arXiv 2604.21428, Sec.
3.3 and App. D.2.)
"""

import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ddiloco_jax.algorithm.fragments import Fragment, Leaf

CHUNK = 1 << 14  # Elements: float64 copies of them stay in the cache.
_CANCELLED = 1e-12  # Norm of the mean direction below which there is none.

DIRECTIONS = ("rda", "average", "clipped", "trimmed_mean", "ties")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig:
  """How the deltas of a round are merged.

  Attributes:
    direction: "rda" or "average"; against replies that mislead, "clipped",
      "trimmed_mean" or "ties" (see `robust`).
    per: What has a norm and a direction of its own: each "tensor", or all of a
      "fragment" that is not averaged.
    average_paths: Glob patterns of the tree paths that are averaged whatever
      the direction: embeddings and the output head. What protects against
      misleading replies does not protect these: give it ().
    clip_factor: Of "clipped" and "ties": a reply is shortened to so many times
      the median norm of its round.
    trim_fraction: Of "trimmed_mean": the share of replies that is left out at
      either end, rounded up, as long as one or two are left.
    ties_keep: Of "ties": the share of a reply's values that is kept.
  """

  direction: str = "rda"
  per: str = "tensor"
  average_paths: tuple[str, ...] = (
    "*embed*",
    "head",
    "head/*",
    "*/head",
    "*/head/*",
    "*lm_head*",
  )
  clip_factor: float = 1.0
  trim_fraction: float = 0.2
  ties_keep: float = 0.2

  def __post_init__(self):
    _check_choice("direction", self.direction, DIRECTIONS)
    _check_choice("per", self.per, ("tensor", "fragment"))
    _check(self, "clip_factor", 1 <= self.clip_factor < math.inf, "at least 1")
    _check(self, "trim_fraction", 0 <= self.trim_fraction < 0.5, "in 0..0.5")
    _check(self, "ties_keep", 0 < self.ties_keep <= 1, "above 0, at most 1")


@dataclasses.dataclass(slots=True)
class _Group:
  """Tensors that share a norm, and what is summed over the replies.

  Attributes:
    rda: Whether they are merged by RDA; else averaged.
    norms: Sum of w ||v||.
    deltas: Sum of w v; while there is one reply, that reply itself.
    directions: Sum of w v / ||v||, from the second reply on.
  """

  paths: tuple[str, ...]
  rda: bool
  norms: float = 0.0
  deltas: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  directions: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Accumulator:
  """Merges the replies of one round as they come.

  Memory, in float32 fragments: for one reply none of its own; from the second
  on one for the sum, one more for tensors under RDA, whose average must be at
  hand should the directions cancel, and the reply that is being added.

  Args:
    leaves: Of the fragment.
    cfg: How to merge.
  """

  def __init__(self, leaves: Sequence[Leaf], cfg: MergeConfig):
    assert cfg.direction in ("rda", "average"), "see robust.make_accumulator"
    averaged = {x.path for x in leaves if is_averaged(x.path, cfg)}
    others = [leaf.path for leaf in leaves if leaf.path not in averaged]
    if cfg.per == "fragment" and others:
      together = [tuple(others)]
    else:
      together = [(path,) for path in others]
    self._leaves = tuple(leaves)
    self._groups = [
      *(_Group((path,), rda=False) for path in sorted(averaged)),
      *(_Group(paths, rda=True) for paths in together),
    ]
    self._first_weight = 0.0
    self._weight = 0.0  # Sum, in units of the first one, as all weights are.
    self._num_replies = 0

  def add(self, delta: Mapping[str, np.ndarray], weight: float) -> None:
    """Adds one reply; nothing is added if it is at fault.

    Args:
      delta: Path -> float32 array. The first one is kept by reference until
        the next: do not write to it.
      weight: At least 0; a reply of weight 0 changes nothing.

    Raises:
      ValueError: a delta or a weight that is not finite, or a weight below 0.
    """
    check_weight(weight)
    for leaf in self._leaves:
      assert delta[leaf.path].shape == leaf.shape, leaf
    norms = [finite_norm(delta, group.paths) for group in self._groups]
    if weight == 0:
      return
    self._first_weight = self._first_weight or weight
    relative = weight / self._first_weight
    for group, n in zip(self._groups, norms):
      _add(group, delta, n, relative, self._num_replies)
    self._weight += relative
    self._num_replies += 1

  def result(self) -> dict[str, np.ndarray]:
    """The merged delta; the accumulator is spent.

    Returns:
      Path -> float32 array. Of one reply, that reply itself.

    Raises:
      ValueError: no reply had a weight above 0.
    """
    if not self._num_replies:
      raise ValueError(
        "Nothing to merge: no reply has a weight above 0. Give the round up."
      )
    merged = {}
    for group in self._groups:
      merged |= _finish(group, self._weight, self._num_replies)
    self._groups = []
    return {leaf.path: merged[leaf.path] for leaf in self._leaves}


def is_averaged(path: str, cfg: MergeConfig) -> bool:
  """Whether a tensor is averaged, by the direction or by its path."""
  return cfg.direction == "average" or any(
    fnmatch.fnmatchcase(path, pattern) for pattern in cfg.average_paths
  )


def check_weight(weight: float) -> None:
  """Raises ValueError for what is no weight."""
  if not (math.isfinite(weight) and weight >= 0):
    raise ValueError(f"A reply's weight is {weight}: at least 0, finite.")


def finite_norm(delta: Fragment, paths: Sequence[str]) -> float:
  """The norm of some tensors of a reply together.

  Raises:
    ValueError: it is not finite.
  """
  found = norm({path: delta[path] for path in paths})
  if not math.isfinite(found):
    raise ValueError(
      f"The delta of {paths[0]!r} has the norm {found}: a delta is finite."
      " Refuse the reply."
    )
  return found


def norm(fragment: Fragment) -> float:
  """Euclidean norm, summed in float64; inf or nan if an element is."""
  return math.sqrt(
    sum(_sum_of_squares(fragment[path]) for path in sorted(fragment))
  )


def _add(
  group: _Group,
  delta: Mapping[str, np.ndarray],
  norm: float,
  weight: float,
  num_before: int,
) -> None:
  if num_before == 1:  # Until now the first reply (of weight 1) is a reference.
    for path in group.paths:
      first = group.deltas[path]
      group.deltas[path] = np.array(first, np.float32, order="C")
      if group.rda:
        group.directions[path] = np.zeros(first.shape, np.float32)
        _add_scaled(group.directions[path], first, _inverse(group.norms))
  for path in group.paths:
    if num_before == 0:
      group.deltas[path] = delta[path]
      continue
    _add_scaled(group.deltas[path], delta[path], weight)
    if group.rda:
      _add_scaled(group.directions[path], delta[path], weight * _inverse(norm))
  group.norms += weight * norm


def _finish(
  group: _Group, weight: float, num_replies: int
) -> dict[str, np.ndarray]:
  if num_replies == 1:
    return group.deltas
  length = norm(group.directions)
  if length / weight < _CANCELLED:  # Also where the group is averaged.
    merged, scale = group.deltas, 1 / weight
  else:
    merged, scale = group.directions, group.norms / weight / length
  for array in merged.values():
    for part in _chunks(array):
      part[:] = part.astype(np.float64) * scale
  return merged


def _inverse(norm: float) -> float:
  """1 / norm; 0 for a zero vector, which has no direction."""
  return 1 / norm if norm else 0.0


def _add_scaled(total: np.ndarray, array: np.ndarray, scale: float) -> None:
  """total += scale * array.

  The product is taken in float64 and rounded before it is added: then
  opposite directions cancel to exactly 0, whatever their lengths.
  """
  for to, part in zip(_chunks(total), _chunks(array)):
    to += (part.astype(np.float64) * scale).astype(np.float32)


def _sum_of_squares(array: np.ndarray) -> float:
  # np.sum adds pairwise and without threads: the same bits every time, which
  # a dot product of the linear algebra library does not promise.
  total = 0.0
  with np.errstate(invalid="ignore"):
    for part in _chunks(array):
      total += float(np.sum(np.square(part.astype(np.float64))))
  return total


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
  flat = np.asarray(array).reshape(-1)
  for start in range(0, flat.size, CHUNK):
    yield flat[start : start + CHUNK]


def _check(cfg: MergeConfig, name: str, holds: bool, rule: str) -> None:
  if not holds:
    raise ValueError(
      f"merge.{name} is {getattr(cfg, name)!r}: it must be {rule}."
    )


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
  if value not in known:
    nearest = difflib.get_close_matches(value, known, 1, 0)[0]
    raise ValueError(
      f"merge.{name} is {value!r}; it is one of {', '.join(known)}. Did you"
      f" mean {nearest!r}?"
    )
