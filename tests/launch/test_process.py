"""What a learner process makes of a run that has come to its end."""

import contextlib

import pytest

from ddiloco_jax.launch import process
from ddiloco_jax.wire.status import ServiceError
from tests.support.over_grpc import (
  SHAPES,
  LoopLearner,
  learners,
  served_run,
  settings,
)
from tests.support.quadratic import Gate, Quadratic
from tests.support.served import wait_for


def test_a_process_that_comes_in_the_end_of_a_run_is_too_late(tmp_path):
  cfg = settings(quorum=1, acknowledge_s=60.0)
  gate = Gate(0.01)
  with served_run(cfg, tmp_path) as run:
    bob = LoopLearner(run.address, "bob", Quadratic(SHAPES, 1.0, 0.05, gate))
    with learners(bob):
      wait_for(lambda: bob.steps)
      joint = process.join(cfg, run.address, "late", takeover=False)
      with contextlib.closing(joint):
        refused = ServiceError("FAILED_PRECONDITION", "another layout")
        assert not joint.is_too_late(refused)  # The run goes on.
        gate.shut()  # bob acknowledges no end: the run cannot finish.
        run.syncer.request_stop("the test ends it")
        wait_for(bob.link.ending)

        with pytest.raises(ServiceError, match="the run is ending") as caught:
          joint.link.start()

        assert joint.is_too_late(caught.value)
      gate.open()
