"""Checkpoints on disk: named trees of arrays and named JSON records, by step.

The only file that imports orbax. A tree is stored as nested dicts named by its
own keys, fields and indices, so "params" opens in plain orbax and flax, and an
optax state comes back with exactly the structure it is asked for, empty states
included. A step is complete or absent. (arXiv 2604.21428, App. E.)
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from ddiloco_jax.training import named

FORMAT = 1  # Raised whenever an older reader would misread a newer checkpoint.
_CONTENTS = "contents"  # Our own record: format, and each tree's arrays.


class CheckpointError(RuntimeError):
  """A checkpoint could not be written or read."""


class Checkpoints:
  """The checkpoints of one process, in a directory of its own.

  Saving is asynchronous: what goes wrong in the background is raised by the
  next save, wait or close, once; then saving may be tried again.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    max_to_keep: int = 3,
    *,
    read_only: bool = False,
  ):
    """Opens a directory; the first save makes it.

    Args:
      directory: Where the steps lie.
      max_to_keep: Older steps are deleted.
      read_only: For the directory of somebody who may be writing it: otherwise
        what a killed save left behind is removed.
    """
    if max_to_keep < 1:
      raise ValueError(
        f"max_to_keep is {max_to_keep}: it must be at least 1, or there is "
        "nothing to restore."
      )
    self.directory = Path(directory).absolute()
    self._max_to_keep = max_to_keep
    self._read_only = read_only
    self._manager: ocp.CheckpointManager | None = None

  def save(
    self,
    step: int,
    trees: Mapping[str, Any],
    records: Mapping[str, Any] | None = None,
  ) -> None:
    """Takes a copy of the trees and writes it in the background.

    Args:
      step: At least 0, and not saved before: a checkpoint is never overwritten.
      trees: name -> pytree of arrays (jax or numpy), which the caller may
        donate or overwrite once this returns.
      records: name -> what strict JSON can say.

    Raises:
      CheckpointError: this save, or the one before it, failed.
      ValueError: a name is used twice or reserved, a record is not JSON, or
        the step exists.
    """
    records = dict(records or {})
    both = sorted(set(trees) & set(records))
    if both or _CONTENTS in {*trees, *records}:
      raise ValueError(
        f"{(both or [_CONTENTS])[0]!r} is used twice: trees and records share "
        f"their names with the record {_CONTENTS!r}; rename it."
      )
    dicts = {name: named.to_dict(tree) for name, tree in trees.items()}
    records[_CONTENTS] = {
      "format": FORMAT,
      "trees": {name: named.describe(tree) for name, tree in dicts.items()},
      "records": sorted(records),
    }
    items = {
      name: ocp.args.StandardSave(tree) for name, tree in dicts.items() if tree
    } | {
      name: ocp.args.JsonSave(_strict(name, record))
      for name, record in records.items()
    }
    self.wait()
    if step in self.steps():
      raise ValueError(
        f"step {step} is already saved in {self.directory}: a checkpoint is "
        "never overwritten; save under a later step, or elsewhere."
      )
    with self._raising(f"save step {step}"):
      # Forced, for a step below the newest would be left out without a word.
      self._open().save(step, args=ocp.args.Composite(**items), force=True)

  def latest(self) -> int | None:
    """The newest complete step, or None."""
    return max(self.steps(), default=None)

  def steps(self) -> list[int]:
    """All complete steps, oldest first."""
    with self._raising("list the steps"):
      if not self.directory.is_dir():
        return []
      return sorted(ocp.utils.checkpoint_steps(self.directory))

  def set_aside(self, step: int) -> Path:
    """Moves a step out of the way, to be looked at; says where it lies."""
    self.close()
    path = self.directory.with_name(f"{self.directory.name}.damaged")
    path.mkdir(exist_ok=True)
    number = 0
    while (target := path / f"{step}-{number}").exists():
      number += 1
    return (self.directory / str(step)).rename(target)

  def restore(
    self, step: int, like: Mapping[str, Any] | None = None
  ) -> dict[str, Any]:
    """Reads trees of a step.

    Args:
      step: One of `steps()`.
      like: name -> tree of the structure to return; its leaves say how: a jax
        array or a ShapeDtypeStruct with a sharding is restored there, whatever
        mesh it was saved from, a numpy array as numpy. None: all trees, as
        nested dicts of numpy arrays.

    Raises:
      ValueError: there is no such step or tree, or it holds other arrays; the
        error names the first path at which they differ.
      CheckpointError: it could not be read.
    """
    saved = self._contents(step)["trees"]
    if like is None:
      targets = {
        name: named.numpy_like(leaves) for name, leaves in saved.items()
      }
    else:
      targets = {name: named.to_dict(tree) for name, tree in like.items()}
      for name, target in targets.items():
        _check_same(f"step {step} in {self.directory}", name, saved, target)
    found = self._read(
      step,
      {
        name: ocp.args.StandardRestore(target)
        for name, target in targets.items()
        if target
      },
    )
    found = {name: found.get(name, {}) for name in targets}
    if like is None:
      return found
    return {name: named.from_dict(found[name], like[name]) for name in like}

  def records(self, step: int) -> dict[str, Any]:
    """Reads the records of a step.

    Raises:
      ValueError: there is no such step, or a newer program wrote it.
      CheckpointError: it could not be read.
    """
    names = [*self._contents(step)["records"]]
    return self._read(step, {name: ocp.args.JsonRestore() for name in names})

  def wait(self) -> None:
    """Blocks until what was saved is on disk.

    Raises:
      CheckpointError: it could not be written.
    """
    if self._manager is not None:
      with self._raising("finish a save"):
        self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, and ends the background threads; call it before exit.

    Raises:
      CheckpointError: a save could not be finished.
    """
    try:
      self.wait()
    finally:
      manager, self._manager = self._manager, None
      if manager is not None:
        manager.close()

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _open(self) -> ocp.CheckpointManager:
    if self._manager is None:
      self._manager = ocp.CheckpointManager(
        self.directory,
        options=ocp.CheckpointManagerOptions(
          max_to_keep=self._max_to_keep,
          create=not self._read_only,
          read_only=self._read_only,
          cleanup_tmp_directories=not self._read_only,
          # In the background, a directory that cannot be made is noticed only
          # when the threads that wait for it time out, after ten minutes.
          async_options=ocp.AsyncOptions(
            create_directories_asynchronously=False
          ),
        ),
      )
    return self._manager

  def _read(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
    if not items:
      return {}
    with self._raising(f"read step {step}"):
      found = self._open().restore(step, args=ocp.args.Composite(**items))
      return {name: found[name] for name in items}

  def _contents(self, step: int) -> dict[str, Any]:
    steps = self.steps()
    if step not in steps:
      raise ValueError(
        f"there is no complete step {step} in {self.directory}: "
        + (f"there are {steps}." if steps else "it holds no checkpoint.")
      )
    read = self._read(step, {_CONTENTS: ocp.args.JsonRestore()})
    if read[_CONTENTS]["format"] > FORMAT:
      raise ValueError(
        f"step {step} in {self.directory} has format "
        f"{read[_CONTENTS]['format']}, but this program reads up to {FORMAT}: "
        "use the newer version that wrote it."
      )
    return read[_CONTENTS]

  @contextmanager
  def _raising(self, what: str) -> Iterator[None]:
    try:
      yield
    except Exception as error:
      # A manager whose save failed raises that for ever: the next call opens
      # a new one, which clears away what the failed save left.
      self._manager = None
      raise CheckpointError(
        f"could not {what} in {self.directory}: "
        f"{type(error).__name__}: {error}; complete steps are kept. Check that "
        "the directory is writable and the disk not full."
      ) from error


def _check_same(
  where: str, name: str, saved: dict[str, Any], target: dict[str, Any]
) -> None:
  if name not in saved:
    raise ValueError(
      f"{where} holds no tree {name!r}: it holds {sorted(saved)}."
    )
  differing = named.difference(named.describe(target), saved[name])
  if differing:
    path, wanted, has = differing
    raise ValueError(
      f"tree {name!r} of {where} does not fit: it has {has} at {path}, where "
      f"{wanted} is wanted; restore into the configuration that it was saved "
      "with."
    )


def _strict(name: str, record: Any) -> Any:
  try:
    return json.loads(json.dumps(record, allow_nan=False))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"the record {name!r} is not strict JSON ({error}): it may hold numbers, "
      "strings, booleans, null, lists and dicts with string keys."
    ) from error
