"""A run in virtual time on a real store, whose files may end it anywhere."""

import os

import numpy as np
import optax

from ddiloco_jax.algorithm import fragments, outer
from ddiloco_jax.algorithm.digest import digest
from ddiloco_jax.protocol import events, machine
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.syncer.files import OsFiles
from ddiloco_jax.syncer.merger import Tensors
from ddiloco_jax.syncer.store import Store
from tests.protocol.driver import Learner, Run

SHAPES = {
  "a": ((3, 4), "float32"),
  "b": ((2, 5), "float32"),
  "c": ((), "float32"),
}
LAYOUT = fragments.make_layout(SHAPES, "tensor", 2)
RULES = Rules(
  num_fragments=2,
  cycle_steps=4,
  fragment_params=tuple(map(LAYOUT.num_params, range(2))),
  max_open_rounds=2,
)
TX = optax.sgd(0.7, momentum=0.5, nesterov=True)


class Crash(BaseException):
  """The process has died."""


class CrashingFiles(OsFiles):
  """Dies at its nth moment: before, within or after an operation.

  Args:
    at: Which moment; 0 for none.
    loses_power: What was not synced by then is gone.

  Attributes:
    num_moments: So far.
  """

  def __init__(self, at: int = 0, loses_power: bool = False):
    self.at, self.loses_power = at, loses_power
    self.num_moments = 0
    self._synced: dict[int, int] = {}  # Length of each open file on disk.
    self._unnamed: list = []  # Files whose directory is not synced yet.

  def _moment(self) -> None:
    self.num_moments += 1
    if not 0 < self.at <= self.num_moments:
      return
    if self.num_moments == self.at and self.loses_power:
      for fd, length in self._synced.items():
        os.ftruncate(fd, length)
      for path in self._unnamed:
        path.unlink()
    raise Crash

  def create(self, path):
    self._moment()
    fd = super().create(path)
    self._synced[fd] = 0
    self._unnamed.append(path)
    self._moment()
    return fd

  def write(self, fd, data):
    self._moment()
    super().write(fd, data[: len(data) // 2])
    self._moment()
    super().write(fd, data[len(data) // 2 :])

  def sync(self, fd):
    self._moment()
    super().sync(fd)
    self._synced[fd] = os.fstat(fd).st_size
    self._moment()

  def close(self, fd):
    self._synced.pop(fd, None)
    super().close(fd)

  def rename(self, old, new):
    self._moment()
    super().rename(old, new)
    self._moment()

  def unlink(self, path):
    self._moment()
    super().unlink(path)
    self._moment()

  def sync_directory(self, path):
    self._moment()
    super().sync_directory(path)
    self._unnamed.clear()
    self._moment()


class DurableRun(Run):
  """Two learners, whose deltas are a function of the version they make.

  Args:
    directory: Of the run.
    files: Of its first life.
    tx: The outer optimizer.

  Attributes:
    store: Of the present life.
    tensors: Theta and outer state, per fragment.
    told: (fragment, n) -> digest of Theta, of everything published.
    starts: The versions that each life began with.
  """

  def __init__(self, directory, files=None, tx=TX):
    super().__init__(RULES, [Learner("ada"), Learner("bob", step_s=1.1)])
    self.directory = directory
    self.tx = tx
    self.told: dict[tuple[int, int], str] = {}
    self.starts: list[list[int]] = []
    self.start(files or OsFiles())

  def start(self, files) -> None:
    """A life of the syncer: its state and tensors come from the directory."""
    has_run = (self.directory / "checkpoints").exists()
    self.store = Store(str(self.directory), restore=has_run, files=files)
    if self.store.has_progress:
      found = self.store.restore(LAYOUT, self.tx)
      self.tensors = found.tensors
      self.state = machine.restore(
        RULES, found.state, self.store.epoch, found.merged
      )
    else:
      theta = tuple(
        {x.path: np.zeros(x.shape, np.float32) for x in LAYOUT.fragment(p)}
        for p in range(2)
      )
      self.tensors = Tensors(
        theta, tuple(outer.init(self.tx, t) for t in theta)
      )
      self.state = machine.initial(RULES, self.store.epoch)
    self.starts.append(self.versions())
    self.store.begin("run-1", sum(self.versions()))
    self.save()
    if not has_run:
      self.store.wait()

  def crash(self, files=None) -> None:
    """The syncer dies, and is started again; its learners live on."""
    self.store.checkpoints.close()
    self.store._lock.close()
    kept = {self._stepped, self._beat}
    self._heap = [entry for entry in self._heap if entry[2] in kept]
    self._heap.sort()
    self._tick_at = None
    self.start(files or OsFiles())
    for learner in self.learners.values():
      learner.deferred = []
      self.tell(
        events.Joined(
          learner=learner.name, nonce=learner.nonce, bases=tuple(learner.bases)
        )
      )

  def save(self) -> None:
    self.store.begin_save()
    spec = {"run_id": "run-1", "layout_digest": LAYOUT.digest()}
    self.store.save(self.tensors, self.state, spec)

  def versions(self) -> list[int]:
    return [fragment.version.n for fragment in self.state.fragments]

  def run_to(self, n: int) -> None:
    """Until every fragment has n merges, and learners have heard of them."""
    self.run(stop=lambda run: min(run.versions()) >= n)

  def _obey(self, effect) -> None:
    if isinstance(effect, events.Merge):
      self.at(self.now + self.merge_s, self._merge, effect)
    else:
      super()._obey(effect)

  def _merge(self, effect) -> None:
    p, n = effect.fragment, effect.version.n
    theta, state = outer.step(
      self.tx, self.tensors.theta[p], delta_of(p, n), self.tensors.outer[p]
    )
    merged = events.Merged(
      fragment=p,
      round=effect.round,
      version=effect.version,
      digest=digest(theta),
    )
    self.store.commit(self.state, merged, theta, state)
    self.told[p, n] = merged.digest
    self.tensors = Tensors(
      _put(self.tensors.theta, p, theta), _put(self.tensors.outer, p, state)
    )
    self.tell(merged)


def delta_of(p: int, n: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng((p, n))
  return {
    leaf.path: rng.normal(size=leaf.shape).astype(np.float32)
    for leaf in LAYOUT.fragment(p)
  }


def _put(values: tuple, p: int, value) -> tuple:
  return (*values[:p], value, *values[p + 1 :])
