"""A learner's diary and the run's payloads give its training again."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from ddiloco_jax.cli import replay

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
  """A real run of two learners, one of them killed and started again."""
  run_dir = tmp_path_factory.mktemp("runs") / "run"
  local(run_dir, "--kill=1@40%:45%", "--record_payloads")
  return run_dir


def local(run_dir, *flags):
  subprocess.run(
    [
      sys.executable,
      "-m",
      "ddiloco_jax.cli.local",
      "--config=tests/support/small.py",
      "--learners=2",
      "--config.sync.num_syncer_steps=600",  # Seen once a second.
      "--config.sync.quorum=2",
      "--config.sync.max_ahead=8",  # Who is left alone waits.
      f"--run_dir={run_dir}",
      *flags,
    ],
    cwd=ROOT,
    check=True,
    timeout=240,
  )


def retrace(run_dir, learner, capsys):
  capsys.readouterr()
  code = replay.main([str(run_dir), f"--learner={learner}", "--json"])
  return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_a_learner_that_was_killed_trains_again_to_the_same_bits(
  recorded, capsys
):
  for learner, num_processes in (("0", 1), ("1", 2)):
    code, result = retrace(recorded, learner, capsys)

    assert (code, result["faults"], result["gaps"]) == (0, [], [])
    assert result["num_processes"] == num_processes
    assert result["num_ends"] == 1
    assert result["num_steps"] >= 10
  # The second process has its inner state of the other learner.
  assert (recorded / "learners" / "1" / "steps" / "1.1.npz").exists()


@pytest.mark.slow
def test_what_differs_or_was_taken_over_is_named(recorded, tmp_path, capsys):
  run_dir = shutil.copytree(recorded, tmp_path / "copy")
  path = run_dir / "learners" / "0" / "steps" / "0.jsonl"
  text = path.read_text().splitlines()
  at = next(i for i, x in enumerate(text) if '"step":5,' in x)
  line = json.loads(text[at])

  path.write_text("\n".join([*text[:at], json.dumps(line | {"loss": 1.0})]))
  code, result = retrace(run_dir, "0", capsys)
  assert code == 1
  assert (
    f"0/steps/0.jsonl, line {at + 1}: step 5 has the loss"
    in (result["faults"][0])
  )

  older = json.dumps(line | {"moments_age": 77})
  path.write_text("\n".join([*text[:at], older]))
  code, result = retrace(run_dir, "0", capsys)
  assert code == 1
  assert "it took over a state" in result["gaps"][0]

  code = replay.main([str(run_dir), "--learner=nobody"])
  assert code == 2
  assert "has no diary of learner 'nobody'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_learner_of_a_restored_run_trains_again_to_the_same_bits(
  tmp_path, capsys
):
  old, new = tmp_path / "old", tmp_path / "new"
  local(old, "--config.run.snapshot_every_merges=8")

  local(new, f"--snapshot={old}/snapshots/1", "--record_payloads")
  code, found = retrace(new, "1", capsys)

  assert code == 0, found
  assert found["gaps"] == []
  assert found["num_steps"] > 10
  assert (found["num_processes"], found["num_ends"]) == (1, 1)
