"""Runs and results of a study that are made once, whoever asks again.

A run that is broken off leaves no `done` in its directory, and is made anew.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SAY_S = 60.0  # A line of progress so often.


def once(path, make):
  """The result at a path, made if it is not there."""
  if not path.exists():
    result = {**make(), "commit": commit()}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, allow_nan=False))
    part.replace(path)
  return json.loads(path.read_text())


def finish(path, module, *options):
  """The absolute path of a run's directory, made anew if it is not whole."""
  path = path.resolve()
  if not (path / "done").exists():
    if path.exists():
      shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    run(path, module, *options)
    (path / "done").touch()
  return path


def run(run_dir, module, *options):
  """Runs a program of the package; says now and then how far it is."""
  log, records = run_dir.with_suffix(".log"), run_dir / "metrics.jsonl"
  argv = [sys.executable, "-m", module, f"--run_dir={run_dir}", *options]
  env = {**os.environ, "PYTHONPATH": str(ROOT)}
  say(f"runs {' '.join(argv[2:])}")
  with log.open("w") as out:
    child = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=out, stderr=out)
    try:
      while not has_ended(child):
        lines = records.read_text().splitlines() if records.exists() else []
        say(f"{run_dir.name}: {lines[-1] if lines else 'starts'}")
    finally:
      child.terminate()  # It has ended, unless this program is told to.
      child.wait()
  if child.returncode:
    raise SystemExit(
      f"{module} ended with exit code {child.returncode}; the end of {log}:\n"
      + "\n".join(log.read_text().splitlines()[-20:])
    )


def has_ended(child):
  try:
    child.wait(SAY_S)
  except subprocess.TimeoutExpired:
    return False
  return True


def say(text):
  print(text, file=sys.stderr, flush=True)


def commit():
  return subprocess.run(
    ["git", "describe", "--always", "--dirty"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  ).stdout.strip()
