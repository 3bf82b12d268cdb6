"""`cli.local` from its command line: what it refuses, and how it is stopped."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from ddiloco_jax.cli import local as command
from ddiloco_jax.launch import exits

ROOT = pathlib.Path(__file__).parents[2]
TINY = str(ROOT / "configs" / "tiny.py")


@pytest.mark.parametrize(
  ("flags", "told"),
  [
    ([], "--config"),
    ([f"--config={TINY}", "--learners=0"], "at least 1 learner"),
    ([f"--config={TINY}", "--kill=9@3"], "no learner '9'"),
    ([f"--config={TINY}", "--kill=1@66%:33%"], "not after"),
    ([f"--config={TINY}", "--restart=perhaps"], "never"),
    ([f"--config={TINY}", "--learner=3"], "no override"),
    ([f"--config={TINY}", "stray"], "no override"),
  ],
)
def test_bad_usage_is_told_before_anything_starts(
  flags, told, capsys, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)

  with pytest.raises(SystemExit) as ended:
    command.main(flags)

  assert ended.value.code == exits.BAD_USAGE
  assert told in capsys.readouterr().err
  assert not list(tmp_path.iterdir())


def start(run_dir: pathlib.Path, *flags: str) -> subprocess.Popen:
  return subprocess.Popen(
    [
      sys.executable,
      "-m",
      "ddiloco_jax.cli.local",
      f"--config={TINY}",
      f"--run_dir={run_dir}",
      *flags,
    ],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def group_members(pids: set[int]) -> set[int]:
  """Those of the process groups that still have a living process."""
  alive = set()
  for entry in pathlib.Path("/proc").iterdir():
    if not entry.name.isdecimal():
      continue
    try:
      fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
      continue
    if fields[0] != "Z" and int(fields[2]) in pids:
      alive.add(int(fields[2]))
  return alive


def children_of(pid: int) -> set[int]:
  path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
  return {int(child) for child in path.read_text().split()}


def test_a_config_that_does_not_exist_is_told_by_the_syncer_and_ends(tmp_path):
  launcher = start(tmp_path / "run", "--config=configs/tyni.py")

  out, _ = launcher.communicate(timeout=120)

  assert launcher.returncode == exits.BAD_USAGE
  assert "tiny.py" in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_ends_all_and_sums_up(number, tmp_path):
  run_dir = tmp_path / "run"
  launcher = start(run_dir, "--learners=2")
  try:
    wait_for_merges(run_dir, 3)
    children = children_of(launcher.pid)
    os.kill(launcher.pid, number)
    out, _ = launcher.communicate(timeout=120)
  finally:
    launcher.kill()

  assert launcher.returncode == exits.OK, out
  assert len(children) == 3
  assert not group_members(children)
  last = pathlib.Path(out.splitlines()[-1])
  told = json.loads(last.read_text())
  assert last == run_dir / "summary.json"
  assert "stop_requested" in told["ending"]
  assert told["loss_end"] < told["loss_start"]


def wait_for_merges(run_dir: pathlib.Path, num: int) -> None:
  path, deadline = run_dir / "metrics.jsonl", time.monotonic() + 200.0
  while not path.exists() or path.read_text().count('"publish"') < num:
    assert time.monotonic() < deadline, "no merge"
    time.sleep(0.2)
