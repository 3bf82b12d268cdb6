"""kill -9 while snapshots are written leaves none that only looks whole."""

import pathlib
import subprocess
import sys
import time

import pytest

from ddiloco_jax.syncer import manifest
from ddiloco_jax.training import seal
from ddiloco_jax.training.checkpoint import Checkpoints

# Takes cuts of 8 MiB, one after the other, as a syncer does, and says so.
WRITER = """
import sys
import numpy as np, optax
from ddiloco_jax.algorithm import outer
from ddiloco_jax.protocol import events, machine
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.syncer.merger import Tensors
from ddiloco_jax.syncer.store import Store
tx, theta = optax.sgd(0.7, 0.9), {"a": np.ones((1 << 20,), np.float32)}
tensors = Tensors((theta,), (outer.init(tx, theta),))
state = machine.initial(Rules(num_fragments=1, cycle_steps=4), 1)
store = Store(sys.argv[1], restore=False)
for number in range(1, 1000):
  path = store.save_cut(number, tensors, state, {"run_id": "r"})
  store.name_cut(events.SnapshotOver(snapshot=number, reason="", path=path))
  print(number, flush=True)
"""


@pytest.mark.parametrize("after_s", [0.01, 0.04, 0.09])
def test_a_kill_leaves_whole_snapshots_only(tmp_path, after_s):
  with subprocess.Popen(
    [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
  ) as writer:
    assert writer.stdout
    assert [int(writer.stdout.readline()) for _ in range(2)] == [1, 2]
    time.sleep(after_s)  # Which moment it hits is left to chance.
    writer.kill()
    said = [1, 2, *map(int, writer.stdout.read().split())]

  begun = {int(p.name) for p in (tmp_path / "snapshots").iterdir()}
  whole = {n for n in begun if is_whole(tmp_path / "snapshots" / str(n))}

  assert set(said) <= whole <= {*said, said[-1] + 1}
  latest = manifest.find(tmp_path / "snapshots" / "latest")
  assert int(latest.name) == max(whole)


def is_whole(path: pathlib.Path) -> bool:
  try:
    found = manifest.find(path)
  except ValueError as error:
    assert "is no whole snapshot" in str(error)  # noqa: PT017
    return False
  seal.check(found / manifest.SYNCER)
  with Checkpoints(found / manifest.SYNCER, read_only=True) as part:
    part.restore(0)
  return True
