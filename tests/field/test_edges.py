"""Where a user's fault ends and a program's own begins: one line, or all."""

import subprocess
import sys

import pytest

from ddiloco_jax.launch import exits, serving, syncing
from tests.support.over_grpc import THETA, settings
from tests.support.processes import ROOT, SYNCER, TRAIN, ending, module

SMALL = "--config=tests/support/small.py"
LOCAL = "ddiloco_jax.cli.local"
BUG = "process.run(lambda: int('x'), '')"
FAULT = "def main():\n  with exits.edge():\n    int('x')\nprocess.run(main, '')"


@pytest.mark.parametrize(
  ("main", "code", "is_traced"),
  [(BUG, exits.FAILED, True), (FAULT, exits.BAD_USAGE, False)],
)
def test_only_what_is_checked_at_the_edge_is_bad_usage(main, code, is_traced):
  lines = "from ddiloco_jax.launch import exits, process\n" + main

  ended = subprocess.run(
    [sys.executable, "-c", lines],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )

  assert ended.returncode == code
  assert ("Traceback" in ended.stderr) == is_traced
  assert "invalid literal for int" in ended.stderr


def in_the_way(base):
  (base / "file").write_text("")
  return base / "file"


def below_a_file(base):
  return in_the_way(base) / "run"


def not_to_be_made(base):
  return "/proc/run"


PLACES = [in_the_way, below_a_file, not_to_be_made]


@pytest.mark.parametrize("place", PLACES)
def test_a_directory_that_cannot_be_written_to_is_named(tmp_path, place):
  run_dir = place(tmp_path)

  with (
    pytest.raises(exits.BadUsage, match="--run_dir") as caught,
    serving.serving(serving.Start(settings(), run_dir, THETA), "127.0.0.1:0"),
  ):
    pass

  assert str(run_dir) in str(caught.value)


def test_a_lock_that_cannot_be_opened_is_named(tmp_path):
  (tmp_path / "lock").mkdir()

  with pytest.raises(exits.BadUsage, match=r"Is a directory.*lock"):
    syncing.SyncerRun(settings(), str(tmp_path), theta=THETA)


@pytest.mark.parametrize("name", [SYNCER, LOCAL, TRAIN])
def test_a_command_tells_it_in_a_line(tmp_path, name):
  run_dir = below_a_file(tmp_path)
  address = () if name == TRAIN else ("--address=127.0.0.1:0",)

  with ending() as start:
    process = start(
      module(name, SMALL, f"--run_dir={run_dir}", *address), tmp_path / "log"
    )
    code = process.wait(60.0)

  said = process.said()
  assert code == exits.BAD_USAGE, said
  assert "Traceback" not in said
  (line,) = [x for x in said.splitlines() if "error: " in x]
  assert str(run_dir) in line
  assert "--run_dir" in line
