"""What stands in the log of a process, and what libraries keep out of it."""

import pathlib
import subprocess
import sys

# A learner that cannot write its part of a cut, and what else may go wrong.
FAILED_SAVE = """
import logging
import pathlib
import resource
import sys
import threading

import numpy as np
from absl import logging as absl_logging

from ddiloco_jax.launch import process


class Bad:
  def __del__(self):
    raise RuntimeError("nobody can catch this")


def main():
  from ddiloco_jax.training.checkpoint import CheckpointError, Checkpoints

  rng = np.random.default_rng(0)
  some = {str(i): rng.standard_normal(100_000) for i in range(20)}
  trees = {name: some for name in ("params", "moments", "bases", "copies")}
  resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
  saving = Checkpoints(pathlib.Path(DIRECTORY))
  try:
    saving.save(0, trees)
    saving.close()
  except CheckpointError as error:
    logging.warning("ours: %s", error)
  absl_logging.error("absl's own")
  try:
    {}["a key"]
  except KeyError:
    logging.exception("our fault")
    absl_logging.exception("of another library")
  thread = threading.Thread(target=lambda: [][7], name="ours")
  thread.start()
  thread.join()
  Bad()
  raise RuntimeError("Event loop is closed")


process.run(main, None)
"""


def test_a_failed_save_is_one_sentence_and_other_faults_keep_their_trace(
  tmp_path: pathlib.Path,
):
  where = str(tmp_path / "0")

  done = subprocess.run(
    [sys.executable, "-c", f"DIRECTORY = {where!r}\n{FAILED_SAVE}"],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )

  log = done.stderr
  saved, _, others = log.partition("ERROR absl's own")
  assert "could not finish a save" in saved, log
  assert "Traceback" not in saved, log
  assert saved.count("\n") <= 2, log
  for fault in (
    "KeyError: 'a key'",
    "ERROR our fault",
    "ERROR of another library",
    "IndexError: list index out of range",
    "RuntimeError: nobody can catch this",
    "RuntimeError: Event loop is closed",
  ):
    assert fault in others, log
  assert done.returncode == 1
