"""What a restart goes on from: a checkpoint, and the commits since."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ddiloco_jax.algorithm import fragments, outer
from ddiloco_jax.protocol import events, machine, saved
from ddiloco_jax.protocol.state import FragmentState
from ddiloco_jax.syncer.journal import Journal, Place
from ddiloco_jax.syncer.merger import Tensors
from ddiloco_jax.training import checkpoint

_log = logging.getLogger(__name__)


class Restored(NamedTuple):
  """What a restart goes on from.

  Attributes:
    tensors: Of the newest commit.
    state: What `machine.save` gave, before `merged`.
    merged: The newest commit; None if it is in `state`.
    spec: Of the run.
    saved_at: Of the checkpoint, in seconds of the run.
  """

  tensors: Tensors
  state: dict[str, Any]
  merged: events.Merged | None
  spec: dict[str, Any]
  saved_at: float


class Added(NamedTuple):
  """A checkpoint with the commits since.

  Attributes:
    found: The result.
    place: Of the newest commit.
    doubts: Sentences: where commits after it may be lost.
  """

  found: Restored
  place: Place | None
  doubts: list[str]


def read_checkpoint(
  checkpoints: checkpoint.Checkpoints,
  step: int,
  layout: fragments.Layout,
  tx: optax.GradientTransformation,
  check: Callable[[Mapping[str, Any]], None],
) -> Restored:
  """What a checkpoint holds.

  Args:
    check: Called with the record of its run, before any tensor is read; raises
      ValueError.

  Raises:
    CheckpointError: it cannot be read.
    ValueError: it is of another model, split, outer optimizer or release.
  """
  records = checkpoints.records(step)
  spec = records["spec"]
  machine.check_format(records["state"])
  check(spec)
  if spec["layout_digest"] != layout.digest():
    raise ValueError(
      f"the checkpoint at step {step} of {checkpoints.directory.parent} has the"
      f" layout {spec['layout_digest']}, this config gives {layout.digest()}: P,"
      " the model and its split may not change in a run. Use the config that is"
      " in the directory."
    )
  theta = tuple(
    {x.path: np.zeros(x.shape, np.float32) for x in layout.fragment(p)}
    for p in range(layout.num_fragments)
  )
  like = trees_of(Tensors(theta, tuple(outer.init(tx, t) for t in theta)))
  found = checkpoints.restore(step, like)
  params = fragments.flatten(found["params"])
  tensors = Tensors(
    tuple({path: params[path] for path in part} for part in theta),
    tuple(found["outer"][str(p)] for p in range(len(theta))),
  )
  state = records["state"]
  return Restored(tensors, state, None, spec, state["now"])


def add_commits(journal: Journal, found: Restored) -> Added:
  """Puts the commits of the journal on top of a checkpoint.

  Raises:
    ValueError: the journal is of another run, model or release.
  """
  versions = versions_of(found)
  newest: dict[int, list[np.ndarray]] = {}
  last: dict[str, Any] | None = None
  place: Place | None = None
  num_excused = 0  # Damage in what is there all the same.
  gap: list[str] = []
  for entry in journal.entries(since=sum(versions)):
    head = entry.head
    if "format" in head:
      _check_same_run(journal, head, entry.place, found)
    fresh, at = list(versions), 0
    if head["num_merges"] > sum(versions):
      for p, n, _ in head.get("fragments", ()):
        fresh[p] = n
      if sum(fresh) != head["num_merges"]:
        gap = [
          f"after merge {sum(versions)} the journal goes on with merge"
          f" {head['num_merges']}, in {journal.path(entry.place)}"
        ]
        break
      for p, _, num in head["fragments"]:
        newest[p] = entry.arrays[at : at + num]
        at += num
      versions, last = fresh, head
    place = entry.place
    num_excused = len(journal.damage)
  for line in journal.damage[:num_excused]:
    _log.warning("%s; what was in it is there all the same", line)
  doubts = journal.damage[num_excused:] + gap
  if last is None:
    return Added(found, place, doubts)
  machine.check_format(last["state"])
  theta, outer_states = list(found.tensors.theta), list(found.tensors.outer)
  for p, arrays in newest.items():
    theta[p], outer_states[p] = _unpack(theta[p], outer_states[p], arrays)
  found = found._replace(
    tensors=Tensors(tuple(theta), tuple(outer_states)),
    state=last["state"],
    merged=saved.decode(events.Merged, last["merged"]),
  )
  return Added(found, place, doubts)


def versions_of(found: Restored) -> list[int]:
  """Of the fragments, with the newest commit."""
  states = saved.decode(tuple[FragmentState, ...], found.state["fragments"])
  versions = [fragment.version.n for fragment in states]
  if found.merged is not None:
    versions[found.merged.fragment] = found.merged.version.n
  return versions


def _check_same_run(
  journal: Journal, head: dict[str, Any], place: Place, found: Restored
) -> None:
  if head["run_id"] != found.spec["run_id"]:
    raise ValueError(
      f"{journal.path(place)} is of the run {head['run_id']}, and the"
      f" checkpoints beside it are of the run {found.spec['run_id']}: commits"
      " of one run are not put on top of another. Bring back the journal"
      f" that belongs to them, or move {journal.directory} away;"
      " nothing was changed."
    )


def _unpack(
  theta: Mapping[str, np.ndarray], state: Any, arrays: Sequence[np.ndarray]
) -> tuple[dict[str, np.ndarray], Any]:
  """A fragment of the arrays of a commit, in the structure of its like."""
  leaves, structure = jax.tree.flatten(state)
  paths = sorted(theta)
  like = [*(theta[path] for path in paths), *leaves]
  for one, other in zip(like, arrays, strict=True):
    if (one.shape, one.dtype) != (other.shape, other.dtype):
      raise ValueError(
        f"the journal has an array of {other.dtype}{other.shape} where this"
        f" config gives {one.dtype}{one.shape}: the model and the kind of outer"
        " optimizer may not change in a run. Use the config that is in the"
        " directory."
      )
  fresh = dict(zip(paths, arrays))
  return fresh, jax.tree.unflatten(structure, arrays[len(theta) :])


def trees_of(tensors: Tensors) -> dict[str, Any]:
  """Tensors as a checkpoint has them."""
  params = {
    path: array for part in tensors.theta for path, array in part.items()
  }
  return {
    "params": fragments.unflatten(params),
    "outer": {str(p): state for p, state in enumerate(tensors.outer)},
  }
