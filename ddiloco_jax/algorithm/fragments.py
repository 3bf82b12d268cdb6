"""A layout assigns every tensor of a model to exactly one fragment.

A fragment is a flat mapping from tree path to array; it travels under these
names from the train state to the merge and back. The layout's digest is what
two sides compare before they exchange one. (arXiv 2604.21428, Sec. 3.1;
2501.18512, Sec. 3.1 for the layer kinds.)
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddiloco_jax.algorithm import split

Fragment = Mapping[str, Any]
Shapes = Mapping[str, tuple[Sequence[int], str]]


class Leaf(NamedTuple):
  """One tensor: where it is in the tree, what it is, who carries it."""

  path: str
  dtype: str
  shape: tuple[int, ...]
  fragment: int

  @property
  def num_params(self) -> int:
    return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FragmentConfig:
  """How a model is split.

  Attributes:
    kind: "balanced" packs whole tensors into fragments of about equal size;
      "tensor" cuts the list of tensors, ordered by path, into runs of about
      equal size; "layer_strided" and "layer_sequential" keep each block of a
      stack (layers_0, layers_1, ...) whole and deal the blocks out in turn or
      in runs.
    num_fragments: P.
  """

  kind: str = "balanced"
  num_fragments: int = 24


@dataclasses.dataclass(frozen=True)
class Layout:
  """Every leaf of a model, ordered by the UTF-8 bytes of its path.

  Raises:
    ValueError: paths that are unordered, repeated or not writable as text, a
      dtype that is not floating, a tensor without elements, or fragments that
      are not 0..P-1.
  """

  leaves: tuple[Leaf, ...]

  def __post_init__(self):
    for leaf in self.leaves:
      _check_leaf(leaf)
    for a, b in itertools.pairwise(self.leaves):
      if a.path.encode() >= b.path.encode():
        raise ValueError(
          f"Layout: {b.path!r} follows {a.path!r}. Every path occurs once, in"
          " the order of its UTF-8 bytes; make_layout sees to that."
        )
    seen = sorted({leaf.fragment for leaf in self.leaves})
    if seen != list(range(len(seen))) or not seen:
      raise ValueError(
        f"Layout: the leaves name the fragments {seen}. Fragments count from"
        " 0 without a gap, and each has a leaf."
      )

  @functools.cached_property
  def _fragments(self) -> tuple[tuple[Leaf, ...], ...]:
    fragments = [[] for _ in {leaf.fragment for leaf in self.leaves}]
    for leaf in self.leaves:
      fragments[leaf.fragment].append(leaf)
    return tuple(map(tuple, fragments))

  @property
  def num_fragments(self) -> int:
    return len(self._fragments)

  def fragment(self, p: int) -> tuple[Leaf, ...]:
    """The leaves of fragment p, in the order of the layout."""
    return self._fragments[p]

  def num_params(self, p: int) -> int:
    return sum(leaf.num_params for leaf in self._fragments[p])

  def text(self) -> str:
    """The canonical text that the .proto file defines: a line per leaf."""
    return "".join(
      f"{leaf.path}\t{leaf.dtype}\t{','.join(map(str, leaf.shape))}"
      f"\t{leaf.fragment}\n"
      for leaf in self.leaves
    )

  def digest(self) -> str:
    """Lower-case hex SHA-256 of the canonical text."""
    return hashlib.sha256(self.text().encode()).hexdigest()

  def difference(self, other: "Layout") -> str | None:
    """Names the first path at which two layouts differ.

    Returns:
      A sentence in which "here" is self and "there" is `other`; None if the
      layouts are equal.
    """
    here = {leaf.path: leaf for leaf in self.leaves}
    there = {leaf.path: leaf for leaf in other.leaves}
    for path in sorted(here.keys() | there.keys()):
      a, b = here.get(path), there.get(path)
      if a != b:
        return f"{path!r} is {_describe(a)} here, {_describe(b)} there."
    return None


def make_layout(shapes: Shapes, kind: str, num_fragments: int) -> Layout:
  """Splits a model into fragments; equal inputs give equal layouts anywhere.

  Args:
    shapes: Tree path -> (shape, dtype name), in any order; see `shapes_of`.
    kind: See `FragmentConfig`.
    num_fragments: P, at most the number of leaves (of blocks, for the layer
      kinds, unless P is 1).

  Raises:
    ValueError: an unknown kind, or more fragments than there is to split.
  """
  if kind not in split.KINDS:
    raise ValueError(
      f"Fragmentation {kind!r} is unknown. Known are {', '.join(split.KINDS)}."
    )
  if not 1 <= num_fragments <= len(shapes):
    raise ValueError(
      f"{num_fragments} fragments of {len(shapes)} leaves: each fragment needs"
      f" a leaf. Set num_fragments to between 1 and {len(shapes)}."
    )
  sizes = {path: math.prod(shapes[path][0]) for path in sorted(shapes)}
  fragments = split.KINDS[kind](sizes, num_fragments)
  return Layout(
    tuple(
      Leaf(path, dtype, tuple(map(int, shape)), fragments[path])
      for path, (shape, dtype) in sorted(shapes.items())
    )
  )


def slot(p: int, num_fragments: int, cycle_steps: int) -> int:
  """The offset in a cycle at which fragment p is due: floor(p * H / P)."""
  if not 0 <= p < num_fragments <= cycle_steps:
    raise ValueError(
      f"Fragment {p} of P={num_fragments} in a cycle of H={cycle_steps} steps:"
      " fragments count from 0, and P is at most H, so that no two share a"
      " slot. Raise cycle_steps or lower num_fragments."
    )
  return p * cycle_steps // num_fragments


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
  """A nested dict as a flat one, keys joined by "/", ordered by path.

  Raises:
    ValueError: a key that is not a non-empty string without "/", or an empty
      subtree; `unflatten` could not give those back.
  """
  flat = {}
  for key, value in tree.items():
    if not isinstance(key, str) or not key or "/" in key:
      raise ValueError(
        f"Tree key {key!r}: keys are non-empty strings without '/', which"
        " joins them into a path. Rename it."
      )
    if not isinstance(value, Mapping):
      flat[key] = value
    elif value:
      flat |= {f"{key}/{path}": leaf for path, leaf in flatten(value).items()}
    else:
      raise ValueError(f"Subtree {key!r} is empty: remove it from the tree.")
  return dict(sorted(flat.items()))


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
  """The nested dict that `flatten` was given."""
  tree: dict[str, Any] = {}
  for path, leaf in flat.items():
    *parents, key = path.split("/")
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
      if not isinstance(node, dict):
        raise ValueError(f"{path!r} lies below a leaf; a path names either.")
    if key in node:
      raise ValueError(f"{path!r} is also a subtree; a path names either.")
    node[key] = leaf
  return tree


def shapes_of(flat: Mapping[str, Any]) -> dict[str, tuple[tuple, str]]:
  """What `make_layout` needs, of arrays or jax.ShapeDtypeStruct."""
  return {path: (tuple(x.shape), str(x.dtype)) for path, x in flat.items()}


def _check_leaf(leaf: Leaf) -> None:
  if not leaf.path or "\t" in leaf.path or "\n" in leaf.path:
    raise ValueError(
      f"Tree path {leaf.path!r}: a path is not empty and has neither tab nor"
      " newline, which part the fields of a layout's text. Rename the key."
    )
  if not leaf.dtype.startswith(("float", "bfloat")):
    raise ValueError(
      f"{leaf.path!r} is {leaf.dtype}: only floating tensors have an outer"
      " gradient. Keep others out of the parameters."
    )
  if any(size < 1 for size in leaf.shape):  # No checkpoint can hold it.
    raise ValueError(
      f"{leaf.path!r} is of shape {leaf.shape}: every tensor has at least one"
      " element. Leave it out of the parameters."
    )


def _describe(leaf: Leaf | None) -> str:
  if leaf is None:
    return "missing"
  dims = ",".join(map(str, leaf.shape))
  return f"{leaf.dtype}[{dims}] in fragment {leaf.fragment}"
