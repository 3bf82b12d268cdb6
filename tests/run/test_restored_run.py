"""A run restored from a cut has the bits of the run that went on.

Under `wait_for_publication` the tape is imposed by the settings: whose copy of
which boundary is merged into which version, and adopted where. What they leave
open is the order in which replies are added up; a gate imposes that.
"""

import threading

import numpy as np
import pytest

from ddiloco_jax import config
from ddiloco_jax.launch import syncing, training
from ddiloco_jax.learner.client import Client
from ddiloco_jax.learner.link import Link
from ddiloco_jax.learner.patience import LinkConfig
from ddiloco_jax.training.checkpoint import Checkpoints
from tests.support import small
from tests.support.over_grpc import served_run
from tests.support.served import wait_for

NAMES = ("0", "1")
NUM_STEPS = 40


def settings(**sync):
  cfg = small.get_config()
  cfg.sync.num_syncer_steps = NUM_STEPS
  cfg.sync.quorum = len(NAMES)
  cfg.sync.wait_for_publication = True
  cfg.sync.max_open_rounds = 4
  cfg.sync.lease_s = 30.0
  cfg.sync.update(sync)
  cfg.run.lr_index = "own"
  return config.freeze(cfg)


class InOrder:
  """Lets learner 1 answer a round once learner 0 has."""

  def __init__(self):
    self.answered: dict[tuple[int, int], threading.Event] = {}
    self.lock = threading.Lock()

  def event(self, header):
    with self.lock:
      name = header.fragment, header.round
      return self.answered.setdefault(name, threading.Event())


class Gated:
  """A client whose replies keep the order of the names."""

  def __init__(self, client, order, name):
    self._client, self._order, self._name = client, order, name

  def __getattr__(self, name):
    return getattr(self._client, name)

  def push(self, header, chunks):
    event = self._order.event(header)
    if self._name != NAMES[0]:
      event.wait(30.0)
    result = self._client.push(header, chunks)
    if self._name == NAMES[0]:
      event.set()
    return result


class Trains(threading.Thread):
  """`training.run_learner` on a thread."""

  def __init__(self, cfg, run, name, order, snapshot=None):
    super().__init__(name=f"learner-{name}", daemon=True)
    self._client = Client(run.address, learner=name)
    self.link = Link(
      Gated(self._client, order, name),
      name,
      LinkConfig(connect_timeout_s=30.0),
    )
    self._args = cfg, self.link, run.directory / "learners" / name
    self._snapshot = snapshot
    self.error: BaseException | None = None

  def run(self):
    try:
      training.run_learner(*self._args, lambda: False, snapshot=self._snapshot)
    except BaseException as error:
      self.error = error
      self.link.leave("failed")
    finally:
      self._client.close()


def train(cfg, directory, snapshot=None, cut_at=0):
  """Runs to the end; a cut is taken after so many merges."""
  order = InOrder()
  with served_run(
    cfg, directory, theta=syncing.init_params(cfg), snapshot=snapshot
  ) as run:
    threads = [Trains(cfg, run, name, order, snapshot) for name in NAMES]
    for thread in threads:
      thread.start()
    over = None
    if cut_at:
      wait_for(
        lambda: sum(f.version.n for f in run.status().fragments) >= cut_at
      )
      over = run.syncer.take_snapshot()
    run.wait(60.0)
    for thread in threads:
      thread.join(30.0)
      assert not thread.is_alive()
      if thread.error:
        raise thread.error
  return over


def newest(directory):
  """Every array of the newest checkpoint, by tree and path."""
  with Checkpoints(directory / "checkpoints", read_only=True) as saved:
    trees = saved.restore(max(saved.steps()))
  return dict(leaves("", trees))


def leaves(path, tree):
  if isinstance(tree, dict):
    for key, below in tree.items():
      yield from leaves(f"{path}/{key}", below)
  else:
    yield path, np.asarray(tree)


@pytest.mark.parametrize(
  "sync",
  [{}, {"alpha": 0.5, "adoption_delay_steps": 1}],
  ids=["diloco", "streaming"],
)
def test_a_run_restored_from_a_cut_has_the_bits_of_the_one_that_went_on(
  tmp_path, sync
):
  cfg = settings(**sync)
  whole, restored = tmp_path / "whole", tmp_path / "restored"
  over = train(cfg, whole, cut_at=8)
  assert over is not None
  assert sorted(over.learners) == list(NAMES), over
  assert sum(v.n for v in over.clock) < NUM_STEPS // 2

  train(cfg, restored, whole / "snapshots" / "latest")

  for part in ("", *(f"learners/{name}" for name in NAMES)):
    one, other = newest(whole / part), newest(restored / part)
    assert one.keys() == other.keys()
    for path, array in one.items():
      np.testing.assert_array_equal(other[path], array, err_msg=part + path)
