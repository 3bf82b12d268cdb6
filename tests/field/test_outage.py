"""A syncer that is away for a while: its learners go on, and are back at once.

The names in brackets are those of public fault reports: what users of such
systems ran into, as a kind.
"""

import signal
import time

import pytest

from ddiloco_jax.protocol import events, tape
from ddiloco_jax.report.ordeal import is_balanced
from tests.support.over_grpc import LoopLearner, learners, paced
from tests.support.processes import (
  SYNCER,
  address_of,
  ending,
  module,
  small_run,
)
from tests.support.served import wait_for

STEP_S = 0.1
CYCLE_STEPS = 8
JOIN_S = 2.0  # From a syncer that listens to everybody joined.
NOISE = 3  # Times as long as asked: tests share a machine of two cores.


@pytest.mark.parametrize(
  "away_s",
  [
    0.0,  # And the seconds that a process takes to start.
    pytest.param(60.0, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
  ],
)
def test_learners_are_back_at_once_after_an_outage(tmp_path, away_s):
  # [T6] SIGKILL; all of them at once, and none ever stood still.
  run_dir = tmp_path / "run"
  flags = small_run(tmp_path, sync__cycle_steps=CYCLE_STEPS)
  with ending() as start:
    first = start(
      module(SYNCER, "--address=127.0.0.1:0", *flags), tmp_path / "1.log"
    )
    address = address_of(run_dir, first)
    three = [
      LoopLearner(address, name, paced(STEP_S))
      for name in ("ada", "bob", "cat")
    ]
    with learners(*three):
      wait_for(lambda: all(len(each.adopted) >= 6 for each in three), 60.0)
      first.signal(signal.SIGKILL)
      first.wait()
      down_at, steps = time.monotonic(), [len(each.steps) for each in three]
      time.sleep(away_s)

      second = start(
        module(SYNCER, f"--address={address}", "--restore", *flags),
        tmp_path / "2.log",
      )
      address_of(run_dir, second)
      up_at = time.monotonic()
      went_on = [len(a.steps) - n for a, n in zip(three, steps)]
      wait_for(lambda: all(a.link.welcome.epoch == 2 for a in three), 60.0)
      joined_s = time.monotonic() - up_at
      wait_for(lambda: all(num_new(each) >= 4 for each in three), 60.0)
      second.signal(signal.SIGTERM)
      assert second.wait(60.0) == 0, second.said()
      reasons = [each.end() for each in three]  # Raises what the loop raised.

  assert len({*reasons}) == 1
  assert joined_s <= NOISE * JOIN_S
  assert min(went_on) >= (up_at - down_at) / STEP_S / NOISE
  reader = tape.Reader(run_dir / "tape.jsonl")
  joined, merged, step_s = returns(reader)
  for name in ("ada", "bob", "cat"):
    # Two slots of its fragments, and a step.
    bound = JOIN_S + (2 * CYCLE_STEPS / 2 + 1) * step_s
    assert merged[name] - joined[name] <= NOISE * bound
  assert is_balanced(reader.state)


def num_new(learner):
  """Adoptions of what the restored syncer has published."""
  return sum(version.epoch == 2 for _, version, *_ in learner.adopted)


def returns(reader):
  """(learner -> its join, learner -> its first merge there, a step's time)."""
  joined, merged, step_s = {}, {}, 0.0
  for line in reader.lines():
    for effect in line.effects:
      if isinstance(effect, events.Welcome):
        joined.setdefault(effect.learner, line.event.time)
      if isinstance(effect, events.Merge):
        step_s = step_s or line.state.step_s or 0.0
        for item in effect.inputs:
          merged.setdefault(item.key.learner, line.event.time)
  return joined, merged, step_s
