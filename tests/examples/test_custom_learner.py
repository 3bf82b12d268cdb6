"""The custom learner of the docs takes part in a real run."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.rules import Rules
from tests.support.served import Served

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "custom_learner.py"


def start(*args: str) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, "-W", "error", str(EXAMPLE), *args],
    cwd=ROOT,
    env={"PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


@pytest.fixture(scope="module")
def theta(tmp_path_factory):
  path = tmp_path_factory.mktemp("model") / "theta.npz"
  process = start(f"--write_model={path}")
  output, _ = process.communicate(timeout=60)
  assert process.returncode == 0, output
  with np.load(path) as arrays:
    return dict(arrays)


def test_it_is_short_and_needs_no_more_than_it_says():
  lines = EXAMPLE.read_text().splitlines()
  imports = [line for line in lines if line.startswith(("import", "from"))]
  third_party = {
    name
    for name in (line.split()[1].split(".")[0] for line in imports)
    if name not in sys.stdlib_module_names
  }

  assert len(lines) < 150
  assert third_party == {"grpc", "numpy", "ddiloco_jax"}
  ours = [line for line in imports if "ddiloco_jax" in line]
  assert ours == ["from ddiloco_jax.wire.pb import synchronizer_pb2 as pb"]


@pytest.mark.parametrize("up_format", ["float32", "bfloat16"])
def test_two_of_them_learn_together_and_end_with_the_run(theta, up_format):
  rules = Rules(num_fragments=2, cycle_steps=8, num_syncer_steps=120, quorum=2)
  run = Served(theta, rules, learning_rate=0.7, up_format=up_format)

  learners = [
    start(f"--syncer={run.address}", f"--learner_id={name}", "--step_s=0.04")
    for name in ("ada", "bob")
  ]
  outputs = [learner.communicate(timeout=60)[0] for learner in learners]
  finished = run.syncer.wait(5.0)
  status = run.syncer.status()
  tensors, _ = run.syncer.snapshot()
  run.close()

  assert [learner.returncode for learner in learners] == [0, 0], outputs
  assert finished.exit_code == 0
  assert not finished.missing
  learned = tensors.theta[0] | tensors.theta[1]
  np.testing.assert_allclose(
    learned["linear/weight"], np.linspace(-1, 1, 8), atol=0.1
  )
  np.testing.assert_allclose(learned["linear/bias"], 1.5, atol=0.1)
  merges = run.all_of(events.Merge)
  assert len(merges) >= 15
  assert {len(merge.inputs) for merge in merges} == {2}
  assert {learner.step > 0 for learner in status.learners} == {True}


def test_a_run_that_is_over_tells_it_so(theta):
  run = Served(theta, Rules(num_fragments=2, cycle_steps=4))
  run.syncer.request_stop("enough")

  learner = start(f"--syncer={run.address}", "--learner_id=ada")
  output, _ = learner.communicate(timeout=60)
  run.close()

  assert learner.returncode != 0
  assert "FAILED_PRECONDITION" in output
  assert "enough" in output
