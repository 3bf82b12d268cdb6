"""A run's directory: one run, one directory, one lock.

Holds the lock for as long as the process lives, raises the epoch durably at
every start, and keeps the syncer's checkpoints: `params` as an item of its own,
so that plain orbax restores it, beside `outer`, `state` and `spec`. Until
`begin`, which is called once nothing can refuse the start any more, the run in
it is as it was.
"""

import contextlib
import fcntl
import json
import os
import pathlib
from typing import Any

import numpy as np
import optax

from ddiloco_jax.algorithm import fragments, outer
from ddiloco_jax.protocol import machine
from ddiloco_jax.syncer.errors import InUse
from ddiloco_jax.syncer.merger import Tensors
from ddiloco_jax.training import checkpoint


class Store:
  """Opens a run's directory.

  Args:
    directory: Made if missing.
    restore: Go on with the run in it.
    max_to_keep: Checkpoints kept.

  Attributes:
    epoch: Of this start.
    has_progress: Whether there is a checkpoint. A run that was killed before
      its first one has none, nobody has joined it, and it begins afresh.

  Raises:
    InUse: a live syncer holds it, or it has a run's progress and `restore` is
      not set, or `restore` is set and there is no run.
  """

  def __init__(self, directory: str, restore: bool, max_to_keep: int = 3):
    self.path = pathlib.Path(directory)
    self.path.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
      self._lock = stack.enter_context(open(self.path / "lock", "a"))
      try:
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        raise InUse(
          f"{directory} is locked by a syncer that is running: one directory"
          " holds one run. Stop that syncer, or give another --run_dir."
        ) from None
      self.checkpoints = checkpoint.Checkpoints(
        str(self.path / "checkpoints"), max_to_keep=max_to_keep
      )
      self._newest = self.checkpoints.latest()  # Or under way.
      self.has_progress = self._newest is not None
      self.epoch = self._last_epoch() + 1
      self._check(restore)
      stack.pop_all()

  def _check(self, restore: bool) -> None:
    if restore and not self.has_progress and self.epoch == 1:
      raise InUse(
        f"{self.path} has no run to restore. Start without --restore, or give"
        " the --run_dir of an earlier run."
      )
    if self.has_progress and not restore:
      raise InUse(
        f"{self.path} already holds a run. Add --restore to go on with it, or"
        " give another --run_dir."
      )

  @property
  def tape(self) -> pathlib.Path:
    return self.path / "tape.jsonl"

  def begin(self) -> None:
    """Makes this start durable: sets the old tape aside, raises the epoch."""
    if self.epoch > 1 and self.tape.exists():
      self.tape.rename(self.path / f"tape.{self.epoch - 1}.jsonl")
    part = self.path / "epoch.part"
    with open(part, "w") as file:
      json.dump(self.epoch, file, allow_nan=False)
      file.flush()
      os.fsync(file.fileno())
    part.rename(self._epoch_file)

  def restore(
    self, layout: fragments.Layout, tx: optax.GradientTransformation
  ) -> tuple[Tensors, dict[str, Any], dict[str, Any]]:
    """The newest complete checkpoint.

    Args:
      layout: Of the model; the checkpoint's must be the same.
      tx: The outer optimizer, whose state is restored.

    Returns:
      Tensors, machine state, run spec.

    Raises:
      ValueError: the checkpoint is of another model, split or outer optimizer.
    """
    step = self.checkpoints.latest()
    assert step is not None
    records = self.checkpoints.records(step)
    spec = records["spec"]
    if spec["layout_digest"] != layout.digest():
      raise ValueError(
        f"the checkpoint at step {step} of {self.path} has the layout"
        f" {spec['layout_digest']}, this config gives {layout.digest()}: P, the"
        " model and its split may not change in a run. Use the config that is"
        " in the directory."
      )
    theta = tuple(
      {x.path: np.zeros(x.shape, np.float32) for x in layout.fragment(p)}
      for p in range(layout.num_fragments)
    )
    like = _trees(Tensors(theta, tuple(outer.init(tx, t) for t in theta)))
    trees = self.checkpoints.restore(step, like)
    params = fragments.flatten(trees["params"])
    tensors = Tensors(
      tuple({path: params[path] for path in part} for part in theta),
      tuple(trees["outer"][str(p)] for p in range(len(theta))),
    )
    return tensors, records["state"], spec

  def save(
    self, tensors: Tensors, state: machine.State, spec: dict[str, Any]
  ) -> None:
    """Starts an asynchronous save, unless these tensors are saved already."""
    step = sum(f.version.n for f in state.fragments)  # Merges so far.
    if step == self._newest:
      return
    self._newest = step
    self.checkpoints.save(
      step,
      trees=_trees(tensors),
      records={"state": machine.save(state), "spec": spec},
    )

  def wait(self) -> None:
    """Blocks until what was saved is on disk."""
    self.checkpoints.wait()

  def close(self) -> None:
    """Waits for saves under way, then gives up the lock."""
    self.checkpoints.close()
    self._lock.close()

  @property
  def _epoch_file(self) -> pathlib.Path:
    return self.path / "epoch"

  def _last_epoch(self) -> int:
    if not self._epoch_file.exists():
      return 0
    return json.loads(self._epoch_file.read_text())


def _trees(tensors: Tensors) -> dict[str, Any]:
  params = {
    path: array for part in tensors.theta for path, array in part.items()
  }
  return {
    "params": fragments.unflatten(params),
    "outer": {str(p): state for p, state in enumerate(tensors.outer)},
  }
