"""Merges that a minority of replies cannot lead anywhere: norm clipping, the
coordinate-wise trimmed mean, and TIES.

Each looks at all replies of a round at once, so that none is added before the
last has come; the replies are kept by reference, and what is computed is a
tensor, or a chunk of one, at a time. Replies are numbered by acceptance.
(Trimmed mean: arXiv 1803.01498, Alg. 1; TIES: 2306.01708, Sec. 3; docs/merging.md
tells which protects against what.)
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ddiloco_jax.algorithm.fragments import Leaf
from ddiloco_jax.algorithm.merge import (
  CHUNK,
  Accumulator,
  MergeConfig,
  check_weight,
  finite_norm,
  is_averaged,
)

Delta = Mapping[str, np.ndarray]


def make_accumulator(
  leaves: Sequence[Leaf], cfg: MergeConfig
) -> "Accumulator | Gatherer":
  """What merges the replies of one round of a fragment, as a config says."""
  if cfg.direction in _MERGES:
    return Gatherer(leaves, cfg)
  return Accumulator(leaves, cfg)


class Gatherer:
  """Gathers the replies of one round and merges them at its end.

  Used as an `Accumulator` is. Memory, in float32 fragments: the replies, which
  are references, one for the result, and for TIES one for what it trims of the
  largest tensor of each reply.

  Args:
    leaves: Of the fragment.
    cfg: How to merge.
  """

  def __init__(self, leaves: Sequence[Leaf], cfg: MergeConfig):
    averaged = [x for x in leaves if is_averaged(x.path, cfg)]
    others = [x for x in leaves if not is_averaged(x.path, cfg)]
    if cfg.per == "fragment" and others:
      self._groups = [tuple(x.path for x in others)]
    else:
      self._groups = [(x.path,) for x in others]
    self._leaves = tuple(leaves)
    self._cfg = cfg
    average = dataclasses.replace(cfg, direction="average")
    self._averaged = Accumulator(averaged, average)
    self._deltas: list[Delta] = []
    self._weights: list[float] = []
    self._norms: list[tuple[float, ...]] = []  # Per reply, by group.

  def add(self, delta: Delta, weight: float) -> None:
    """Adds one reply; see `Accumulator.add`. It is kept by reference."""
    check_weight(weight)
    for leaf in self._leaves:
      assert delta[leaf.path].shape == leaf.shape, leaf
    norms = tuple(finite_norm(delta, paths) for paths in self._groups)
    self._averaged.add(delta, weight)
    if weight == 0:
      return
    self._deltas.append(delta)
    self._weights.append(weight)
    self._norms.append(norms)

  def result(self) -> dict[str, np.ndarray]:
    """The merged delta; the gatherer is spent. See `Accumulator.result`."""
    merged = self._averaged.result()
    merge = _MERGES[self._cfg.direction]
    largest = max(self._weights)  # Their sum might not be finite.
    weights = np.array([max(w / largest, 1e-200) for w in self._weights])
    weights /= weights.sum()
    for i, paths in enumerate(self._groups):
      scales = _clip([norms[i] for norms in self._norms], self._cfg.clip_factor)
      for path in paths:
        tensors = [np.asarray(d[path], np.float32) for d in self._deltas]
        merged[path] = merge(tensors, weights, scales, self._cfg)
    self._deltas = []
    return {leaf.path: merged[leaf.path] for leaf in self._leaves}


def _clip(norms: Sequence[float], factor: float) -> np.ndarray:
  """What brings each norm to at most `factor` times their median.

  The median is of those above 0: who has nothing to say of a tensor does not
  silence who has. Of two, it is the smaller.
  """
  longer = sorted(n for n in norms if n > 0)
  if not longer:
    return np.ones(len(norms))
  bound = factor * longer[(len(longer) - 1) // 2]
  return np.array([min(1.0, bound / n) if n else 1.0 for n in norms])


def _clipped(tensors, weights, scales, cfg: MergeConfig) -> np.ndarray:
  """The weighted average of the replies, none of them longer than the bound."""
  if len(tensors) == 1:
    return tensors[0]
  shares = (weights * scales)[:, None]
  return _by_chunk(tensors, lambda stack: (shares * stack).sum(0))


def _trimmed(tensors, weights, scales, cfg: MergeConfig) -> np.ndarray:
  """Per coordinate, the weighted mean of what lies between the k-th extremes.

  Trimmed by count, so that no claimed weight buys a way in: with at most k
  replies that mislead, the ends of what is left are, or lie between, values of
  honest ones, and so does the mean, whatever its weights.
  """
  num = len(tensors)
  k = min(math.ceil(cfg.trim_fraction * num - 1e-9), (num - 1) // 2)

  def mean(stack: np.ndarray) -> np.ndarray:
    ordered = np.sort(stack, axis=0)
    is_kept = (stack >= ordered[k]) & (stack <= ordered[num - 1 - k])
    shares = weights[:, None] * is_kept
    return (shares * stack).sum(0) / shares.sum(0)

  return tensors[0] if num == 1 else _by_chunk(tensors, mean)


def _ties(tensors, weights, scales, cfg: MergeConfig) -> np.ndarray:
  """TIES of replies that were clipped first, since long ones would outvote.

  Per reply the largest share of values is kept; the sign of a coordinate is
  that of their sum, one reply one vote; the weighted mean of those that have it
  is the result, and 0 where nobody has.
  """
  if len(tensors) == 1:
    return tensors[0]
  kept = [_keep_largest(x, cfg.ties_keep) for x in tensors]

  def elect(stack: np.ndarray) -> np.ndarray:
    stack = stack * scales[:, None]
    agree = np.sign(stack) == np.sign(stack.sum(0))
    agree &= stack != 0
    shares = weights[:, None] * agree
    total = shares.sum(0)
    return (shares * stack).sum(0) / np.where(total > 0, total, 1.0)

  return _by_chunk(kept, elect)


def _keep_largest(tensor: np.ndarray, share: float) -> np.ndarray:
  """A tensor whose smaller values are 0; equal ones are kept together."""
  num = math.ceil(share * tensor.size)
  if num >= tensor.size:
    return tensor
  lengths = np.abs(tensor)
  least = np.partition(lengths.reshape(-1), tensor.size - num)[-num]
  return np.where(lengths >= least, tensor, np.float32(0))


def _by_chunk(
  tensors: Sequence[np.ndarray], merge: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
  """A function of float64 [replies, values] over tensors of one shape."""
  result = np.empty(tensors[0].shape, np.float32)
  flat = result.reshape(-1)
  parts = [x.reshape(-1) for x in tensors]
  for start in range(0, flat.size, CHUNK):
    here = slice(start, start + CHUNK)
    flat[here] = merge(np.stack([x[here] for x in parts]).astype(np.float64))
  return result


_MERGES = {"clipped": _clipped, "trimmed_mean": _trimmed, "ties": _ties}
