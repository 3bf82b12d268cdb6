"""Processes and threads that a learner starts while its streams are open.

gRPC does not survive a fork: nothing here may use one.
"""

import ast
import os
import pathlib
import subprocess
import sys

from tests.support.processes import ROOT, TRAIN, ending, overrides

SCRIPT = ROOT / "tests" / "support" / "starts_processes.py"
# Their pools are spawned, and they open no stream.
SPAWNS = (
  ROOT / "scripts" / "explore.py",
  ROOT / "ddiloco_jax" / "launch" / "simulating.py",
)
CODE = ("ddiloco_jax", "scripts", "configs", "docs/examples")
# What runs before a module, in the same process: a fork ends it.
NO_FORK = (
  "import os, runpy, sys;"
  "os.register_at_fork(before=lambda: os._exit(77));"
  "sys.argv = sys.argv[1:];"
  "runpy.run_module(sys.argv[0], run_name='__main__')"
)


def test_what_is_started_beside_open_streams_does_not_hang():
  # [T7] A subprocess, a spawned pool, reader threads; merges go on after it.
  said = subprocess.run(
    [sys.executable, SCRIPT],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )

  assert said.returncode == 0, said.stdout + said.stderr
  assert "merges went on" in said.stdout


def test_a_training_process_never_forks(tmp_path):
  # [T7] Config, data, compilation, steps and a checkpoint, from end to end.
  flags = (
    "--config=tests/support/small.py",
    f"--run_dir={tmp_path / 'run'}",
    *overrides(run__num_steps=3),
  )
  with ending() as start:
    process = start(
      [sys.executable, "-c", NO_FORK, TRAIN, *flags], tmp_path / "log"
    )
    code = process.wait(120.0)

  assert code == 0, process.said()


def test_the_fork_detector_detects_forks(tmp_path):
  (tmp_path / "forking.py").write_text("import os\nos.fork()\n")

  code = subprocess.run(
    [sys.executable, "-c", NO_FORK, "forking"],
    env={**os.environ, "PYTHONPATH": str(tmp_path)},
    check=False,
  ).returncode

  assert code == 77


def test_no_source_asks_for_a_fork():
  found = []
  for folder in CODE:
    for path in sorted((ROOT / folder).rglob("*.py")):
      if path in SPAWNS:
        continue
      found += [f"{path}:{line}" for line in forks(path)]

  assert found == []


def forks(path: pathlib.Path) -> list[int]:
  """Lines that fork, or may: os.fork, a start method, preexec_fn, pools."""
  lines = []
  for node in ast.walk(ast.parse(path.read_text("utf-8"))):
    named = getattr(node, "attr", None) or getattr(node, "id", None)
    is_fork = named in ("fork", "forkpty", "forkserver", "ProcessPoolExecutor")
    is_fork |= isinstance(node, ast.keyword) and node.arg == "preexec_fn"
    is_fork |= isinstance(node, ast.Constant) and node.value == "fork"
    if isinstance(node, ast.Import):
      is_fork |= any("multiprocessing" in alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
      is_fork |= "multiprocessing" in (node.module or "")
    if is_fork:
      lines.append(getattr(node, "lineno", 0))
  return lines
