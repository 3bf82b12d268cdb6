"""Data that is used up, and data that comes after it."""

import threading

import numpy as np
import pytest

from tests.support.over_grpc import (
  SHAPES,
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.quadratic import Gate, Quadratic
from tests.support.served import wait_for


def test_a_shard_that_is_given_back_comes_after_one_that_was_used_up(tmp_path):
  used_up: set[int] = set()

  def make_batches(shard):
    def batch(position):
      if shard in used_up:
        return None
      return {"weights": np.ones(100, np.float32)}

    return batch

  cfg = settings(
    quorum=1,
    lease_s=1.5,
    max_learners=3,
    num_shards=6,
    shards_per_learner=2,
    shard_lease_s=8.0,
  )
  gate = Gate(0.01)
  with served_run(cfg, tmp_path) as run:

    def reads(name):
      return set(run.syncer.snapshot()[1].learners[name].reads)

    first = LoopLearner(run.address, "ada", paced(0.01))
    bob = LoopLearner(run.address, "bob", paced(0.01))
    carol = LoopLearner(
      run.address, "carol", Quadratic(SHAPES, 1.0, 0.05, gate)
    )
    with learners(first):
      wait_for(lambda: first.steps)
      own = reads("ada")
      with learners(bob, carol):
        wait_for(lambda: bob.steps and carol.steps)
        first.kill()
        wait_for(lambda: reads("bob") & own and reads("carol") & own)
        gate.shut()  # carol stays in a step: she gives nothing back.
        (short,) = reads("bob") & own
        used_up.add(short)
        ada = LoopLearner(
          run.address, "ada", paced(0.01), make_batches, takeover=True
        )
        with learners(ada):
          wait_for(lambda: reads("ada") == {short})
          wait_for(lambda: run.syncer.snapshot()[1].learners["ada"].exhausted)
          assert not ada.steps
          gate.open()
          wait_for(lambda: len(ada.steps) >= 5)
          assert not run.syncer.snapshot()[1].learners["ada"].exhausted
          assert reads("ada") == own
          assert (ada.error, bob.error, carol.error) == (None, None, None)


@pytest.mark.parametrize("blocked", ["exhausted", "waits"])
def test_a_learner_that_takes_no_step_gives_a_shard_back_at_once(
  tmp_path, blocked
):
  is_used_up = threading.Event()

  def make_batches(shard):
    return lambda position: (
      None if is_used_up.is_set() else {"weights": np.ones(100, np.float32)}
    )

  waits = blocked == "waits"
  cfg = settings(
    quorum=2 if waits else 1,
    wait_for_publication=waits,
    lease_s=1.5,
    quorum_timeout_s=120.0,
    max_learners=3,
    num_shards=6,
    shard_lease_s=3.0,
  )
  with served_run(cfg, tmp_path) as run:

    def process(name):
      return run.syncer.snapshot()[1].learners[name]

    first = LoopLearner(run.address, "ada", paced(0.01))
    bob = LoopLearner(run.address, "bob", paced(0.01), make_batches)
    carol = LoopLearner(run.address, "carol", paced(0.01))
    with learners(first, bob):
      wait_for(lambda: first.steps and bob.steps)
      own = set(process("ada").reads)
      first.kill()
      wait_for(lambda: own & set(process("bob").reads))
      ada = LoopLearner(run.address, "ada", paced(0.01), takeover=True)
      with learners(*(() if waits else (carol,))):
        if not waits:
          wait_for(lambda: carol.steps)
          is_used_up.set()
          wait_for(lambda: process("bob").exhausted)
        with learners(ada):
          wait_for(lambda: ada.steps)
          assert set(process("ada").reads) == own
          assert not process("bob").gone
          assert bob.error is None
