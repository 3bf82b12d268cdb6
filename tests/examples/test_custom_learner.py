"""The custom learner of the docs takes part in a real run, without our package.

It stands where a user puts it: in a directory of its own, beside the messages
that the documented command made of the .proto file.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.rules import Rules
from tests.support.served import Served

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "custom_learner.py"
PROTOC = "    python -m grpc_tools.protoc "
# Python imports this before anything else: our package is not to be had.
NOT_OURS = "import sys; sys.modules['ddiloco_jax'] = None\n"


def run_python(place: pathlib.Path, *args: str) -> subprocess.Popen:
  """As a user does in that directory."""
  env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
  return subprocess.Popen(
    [sys.executable, *args],
    cwd=place,
    env=env | {"PYTHONPATH": str(place)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def start(place: pathlib.Path, *args: str) -> subprocess.Popen:
  return run_python(place, "-W", "error", "custom_learner.py", *args)


def documented(page: str) -> str:
  """The command that a page says makes the messages."""
  lines = (ROOT / page).read_text("utf-8").splitlines()
  (command,) = [line for line in lines if line.startswith(PROTOC)]
  return command


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A directory of a user, who has the example and the .proto file."""
  place = tmp_path_factory.mktemp("elsewhere")
  shutil.copytree(ROOT / "protos", place / "protos")
  shutil.copy(EXAMPLE, place)
  (place / "sitecustomize.py").write_text(NOT_OURS)
  command = shlex.split(documented("docs/protocol.md"))
  made = run_python(place, *command[1:])
  output, _ = made.communicate(timeout=60)
  assert made.returncode == 0, output
  assert (place / "synchronizer_pb2.py").exists()
  return place


@pytest.fixture(scope="module")
def theta(place):
  process = start(place, "--write_model=theta.npz")
  output, _ = process.communicate(timeout=60)
  assert process.returncode == 0, output
  with np.load(place / "theta.npz") as arrays:
    return dict(arrays)


def test_our_package_is_not_to_be_had_there(place):
  process = run_python(place, "-c", "import ddiloco_jax.wire.pb")
  output, _ = process.communicate(timeout=60)

  assert process.returncode != 0
  assert "ModuleNotFoundError" in output


def test_the_readme_says_the_same_command():
  assert documented("README.md") == documented("docs/protocol.md")


def test_it_is_short_and_needs_no_more_than_it_says():
  lines = EXAMPLE.read_text().splitlines()
  imports = [line for line in lines if line.startswith(("import", "from"))]
  third_party = {
    name
    for name in (line.split()[1].split(".")[0] for line in imports)
    if name not in sys.stdlib_module_names
  }

  assert len(lines) < 150
  assert third_party == {"grpc", "numpy", "synchronizer_pb2"}


@pytest.mark.parametrize("up_format", ["float32", "bfloat16"])
def test_two_of_them_learn_together_and_end_with_the_run(
  place, theta, up_format
):
  rules = Rules(num_fragments=2, cycle_steps=8, num_syncer_steps=120, quorum=2)
  run = Served(theta, rules, learning_rate=0.7, up_format=up_format)

  learners = [
    start(
      place,
      f"--syncer={run.address}",
      f"--learner_id={name}",
      "--step_s=0.04",
    )
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


def test_a_run_that_is_over_tells_it_so(place, theta):
  run = Served(theta, Rules(num_fragments=2, cycle_steps=4))
  run.syncer.request_stop("enough")

  learner = start(place, f"--syncer={run.address}", "--learner_id=ada")
  output, _ = learner.communicate(timeout=60)
  run.close()

  assert learner.returncode != 0
  assert "FAILED_PRECONDITION" in output
  assert "enough" in output
