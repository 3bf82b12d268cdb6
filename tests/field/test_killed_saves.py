"""[C4] kill -9 while checkpoints are saved: the next start has a complete one."""

import random
import subprocess
import sys
import time

import pytest

# A life: finds the newest complete step, checks that it is one, tells it, and
# saves on. Learners and the syncer save in this way.
SAVER = """
import sys
import numpy as np
from ddiloco_jax.training.checkpoint import Checkpoints

def trees(step):
  arrays = {"w": np.full(1 << 18, step, np.float32)}
  return {"params": arrays, "opt_state": {"mu": arrays, "nu": arrays}}

with Checkpoints(sys.argv[1], max_to_keep=2) as saved:
  last = saved.latest() or 0
  if last:
    for name, tree in saved.restore(last).items():
      for array in (tree["w"],) if name == "params" else (
        tree["mu"]["w"], tree["nu"]["w"]
      ):
        assert np.all(array == last), (last, name, np.unique(array))
    assert saved.records(last)["state"] == {"step": last}
  print(last, flush=True)
  for step in range(last + 1, last + 1000):
    saved.save(step, trees(step), {"state": {"step": step}})
    print(step, flush=True)  # Under way: the one before it is complete.
"""


@pytest.mark.parametrize(
  "num_kills",
  [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_c4_a_start_after_a_kill_has_a_complete_step(tmp_path, num_kills):
  rng, directory = random.Random(num_kills), tmp_path / "checkpoints"
  least = most = 0
  for _ in range(num_kills):
    found, said = life(directory, rng.uniform(0.0, 0.3))
    assert least <= found <= most
    least, most = said[-1] - 1, said[-1]

  found, said = life(directory, 0.0)
  assert least <= found <= most
  # The first save of a life clears away what the last one left.
  left = {path.name for path in directory.iterdir()}
  numbers = {int(name) for name in left if name.isdecimal()}
  half = {name for name in left if not name.isdecimal()}
  assert len(numbers) <= 3
  assert all(name.startswith(tuple(map(str, said))) for name in half), half


def life(directory, after_s):
  """Saves for so long after three steps; (what it found, what it began)."""
  with subprocess.Popen(
    [sys.executable, "-c", SAVER, directory], stdout=subprocess.PIPE
  ) as process:
    assert process.stdout
    first = process.stdout.readline()
    assert first, "it did not start"
    begun = [int(process.stdout.readline()) for _ in range(3)]
    time.sleep(after_s)  # Which moment it hits is left to chance.
    process.kill()
    begun += map(int, process.stdout.read().split())
  return int(first), begun
