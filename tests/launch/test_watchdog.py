"""A process that hangs ends by itself; one that was stopped does not."""

import contextlib
import signal
import subprocess
import sys
import time

import pytest

from ddiloco_jax.launch import exits

HANGS = """
import time
from ddiloco_jax.launch.watchdog import Watchdog
dog = Watchdog(1.0, lambda: False)
dog()
def hang_here():
  time.sleep(60)
hang_here()
"""
STEPS = """
import sys, time
from ddiloco_jax.launch.watchdog import Watchdog
dog = Watchdog(2.0, lambda: False)
print("steps", flush=True)
for _ in range(100):
  assert not dog()
  time.sleep(0.05)
dog.close()
"""


@contextlib.contextmanager
def started(program):
  process = subprocess.Popen(
    [sys.executable, "-c", program],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    yield process
  finally:
    process.kill()
    process.communicate()


def test_a_process_that_hangs_ends_and_says_where():
  with started(HANGS) as process:
    _, said = process.communicate(timeout=60)

  assert process.returncode == exits.STUCK
  assert "run.stuck_s is 1" in said
  assert "hang_here" in said


@pytest.mark.parametrize("stopped_s", [0.0, 5.0])
def test_a_process_that_steps_lives_through_a_stop(stopped_s):
  with started(STEPS) as process:
    assert process.stdout.readline() == "steps\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(stopped_s)
    process.send_signal(signal.SIGCONT)

    _, said = process.communicate(timeout=60)

  assert (process.returncode, said) == (0, "")
