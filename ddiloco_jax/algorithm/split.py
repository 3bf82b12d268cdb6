"""The ways to split a model: which fragment carries which tensor.

Each takes `sizes`, path -> number of parameters in the order of the paths, and
P, and returns path -> fragment; ties are broken by path. (arXiv 2604.21428,
Sec. 3.1; 2501.18512, Sec. 3.1 for the layer kinds.)
"""

import bisect
import functools
import itertools
import re
from collections.abc import Callable, Iterable


def balanced(sizes: dict[str, int], num_fragments: int) -> dict[str, int]:
  """Packs whole tensors into fragments of about equal size."""
  return _pack(sizes, [0] * num_fragments)


def by_tensor(sizes: dict[str, int], num_fragments: int) -> dict[str, int]:
  """Cuts where the running size is nearest to the next multiple of 1/P."""
  ends = list(itertools.accumulate(sizes.values()))
  cuts = [0]
  for p in range(1, num_fragments):
    target = ends[-1] * p / num_fragments
    after = bisect.bisect_left(ends, target)
    under = ends[after - 1] if after else 0
    cut = after if target - under <= ends[after] - target else after + 1
    cuts.append(min(max(cut, cuts[-1] + 1), len(ends) - num_fragments + p))
  return {
    path: bisect.bisect_right(cuts, i) - 1 for i, path in enumerate(sizes)
  }


def by_layer(
  sizes: dict[str, int], num_fragments: int, *, strided: bool
) -> dict[str, int]:
  """Deals out blocks; then packs the rest (embedding, head, final norm)."""
  if num_fragments == 1:
    return dict.fromkeys(sizes, 0)
  block_of = _find_blocks(sizes)
  blocks = sorted(set(block_of.values()))
  num_blocks = len(blocks)
  if num_blocks < num_fragments:
    raise ValueError(
      f"{num_fragments} fragments of {num_blocks} blocks: a block is kept"
      " whole, and is one of several siblings such as layers_0, layers_1."
      f" Set num_fragments to at most {max(1, num_blocks)}, or the kind to"
      " 'balanced' (a stack that is scanned into one array has no blocks)."
    )
  number = {block: i for i, block in enumerate(blocks)}
  fragments = {}
  loads = [0] * num_fragments
  for path, block in block_of.items():
    i = number[block]
    p = i % num_fragments if strided else i * num_fragments // num_blocks
    fragments[path] = p
    loads[p] += sizes[path]
  rest = {path: n for path, n in sizes.items() if path not in fragments}
  return fragments | _pack(rest, loads)


def _pack(sizes: dict[str, int], loads: list[int]) -> dict[str, int]:
  """Largest first into the least loaded bin: at most 4/3 of the optimum."""
  bins = [(load, 0, p) for p, load in enumerate(loads)]
  fragments = {}
  for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
    load, num_leaves, p = min(bins)
    bins[p] = (load + sizes[path], num_leaves + 1, p)
    fragments[path] = p
  return fragments


def _find_blocks(paths: Iterable[str]) -> dict[str, tuple]:
  """Path -> (stack, index) of the outermost numbered component with siblings.

  A number without siblings (the Norm_0 that flax names by itself) does not
  make a block.
  """
  numbered = re.compile(r"(?:.*_)?(?=\d+$)")
  places: dict[str, list[tuple[str, int]]] = {}
  stacks: dict[str, set[int]] = {}
  for path in paths:
    components = path.split("/")
    places[path] = []
    for depth, component in enumerate(components):
      if match := numbered.match(component):
        stack = "/".join([*components[:depth], match[0]])
        index = int(component[match.end() :])
        places[path].append((stack, index))
        stacks.setdefault(stack, set()).add(index)
  found = {
    path: next((x for x in places[path] if len(stacks[x[0]]) > 1), None)
    for path in paths
  }
  return {path: block for path, block in found.items() if block}


KINDS: dict[str, Callable[[dict[str, int], int], dict[str, int]]] = {
  "balanced": balanced,
  "tensor": by_tensor,
  "layer_strided": functools.partial(by_layer, strided=True),
  "layer_sequential": functools.partial(by_layer, strided=False),
}
