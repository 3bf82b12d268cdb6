"""C8 and C9: the syncer dies at any operation on its files, and comes back.

Deltas depend on the version that they make, so that a run which was cut and
goes on must come to the very bits of one that was not.
"""

import shutil

import jax
import numpy as np
import optax
import pytest

from ddiloco_jax.algorithm.digest import digest
from ddiloco_jax.protocol.status import account_totals
from ddiloco_jax.syncer.errors import Superseded
from ddiloco_jax.syncer.files import OsFiles
from ddiloco_jax.syncer.journal import Journal
from tests.support.crashing import TX, Crash, CrashingFiles, DurableRun

NUM_MERGES = 5
ADAM = optax.adam(0.1)  # It counts its steps in an array without dimensions.


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
  """Ten merges and no crash."""
  run = DurableRun(tmp_path_factory.mktemp("uncut") / "run")
  run.run_to(10)
  run.store.close()
  return run


@pytest.mark.parametrize("tx", [TX, ADAM], ids=["sgd", "adam"])
def test_ten_rounds_with_a_restore_equal_ten_without(tmp_path, tx):
  uncut = DurableRun(tmp_path / "uncut", tx=tx)
  uncut.run_to(10)
  uncut.store.close()

  run = DurableRun(tmp_path / "run", tx=tx)
  for n in (3, 6, 7):
    run.run_to(n)
    run.crash()
    assert min(run.starts[-1]) >= n
  run.run_to(10)
  run.store.close()

  assert_same_prefix(run, uncut)
  assert run.versions() == uncut.versions()
  for one, other in (
    (run.tensors.theta, uncut.tensors.theta),
    (run.tensors.outer, uncut.tensors.outer),
  ):
    jax.tree.map(np.testing.assert_array_equal, one, other)
  check_books(run.state)


@pytest.mark.slow
@pytest.mark.parametrize("loses_power", [False, True])
def test_a_crash_at_every_operation_on_files(tmp_path, uncut, loses_power):
  at, crashed = 0, True
  while crashed:
    at += 1
    crashed = crash_once(tmp_path / str(at), uncut, at, loses_power)
    shutil.rmtree(tmp_path / str(at))
  assert at > 60


@pytest.mark.parametrize("at", [1, 2, 4, 6, 9, 12, 14, 17, 20, 23, 40, 60])
def test_a_crash_at_some_operations_on_files(tmp_path, uncut, at):
  assert crash_once(tmp_path / "run", uncut, at, loses_power=bool(at % 2))


def crash_once(directory, uncut, at, loses_power) -> bool:
  """A life that dies at its moment `at`, and the life after it."""
  run = DurableRun(directory)
  run.run_to(2)
  files = CrashingFiles(at, loses_power)
  crashed = False
  try:
    run.crash(files)
    run.run_to(3)
    run.save()
    run.store.wait()
    run.run_to(4)
    run.save()  # Deletes what the save before it covers.
  except Crash:
    crashed = True
  files.at = 0
  run.crash()
  check_start(run)
  run.run_to(NUM_MERGES)
  assert_same_prefix(run, uncut)
  check_books(run.state)
  run.store.close()
  return crashed


def check_start(run) -> None:
  """Every version that was told of is there, and at most one more."""
  for p, n in enumerate(run.starts[-1]):
    told = max(m for q, m in run.told if q == p)
    assert n in (told, told + 1)


def assert_same_prefix(run, uncut) -> None:
  """Everything published is what a run without a crash publishes, gapless."""
  for p in range(2):
    told = sorted(n for q, n in run.told if q == p)
    assert told[-1] == run.versions()[p]
    for n in told:
      if (p, n) in uncut.told:
        assert run.told[p, n] == uncut.told[p, n]
    assert digest(run.tensors.theta[p]) == run.told[p, told[-1]]


def check_books(state) -> None:
  """reported = merged + discarded + pending; nothing is merged twice."""
  for p, fragment in enumerate(state.fragments):
    merged = 0
    for name in state.learners:
      totals = account_totals(state, name, p)
      rest = [totals.merged, totals.pending, *(c for _, c in totals.discarded)]
      assert totals.reported.tokens == sum(c.tokens for c in rest)
      merged += totals.merged.tokens
    assert merged == fragment.merged.tokens


def test_a_syncer_whose_run_was_taken_over_publishes_no_more(tmp_path):
  run = DurableRun(tmp_path / "run")
  run.run_to(2)
  told = run.versions()
  other = Journal(tmp_path / "run" / "journal", OsFiles())
  other.fence(run.store.epoch + 1)
  place = [entry.place for entry in other.entries()][-1]
  other.begin({"run_id": "run-1"}, place, sum(told))

  with pytest.raises(Superseded, match="epoch 2"):
    run.run_to(3)
  assert run.versions() == told
  run.crash()

  assert run.starts[-1] == told  # What it wrote after that counts for nothing.
  assert run.store.epoch == 3
  run.run_to(4)
  check_books(run.state)
  run.store.close()
