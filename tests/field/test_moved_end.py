"""The end of a run is moved at a restart of its syncer; learners live through it."""

import shutil

from tests.support.over_grpc import LoopLearner, learners, paced, served_run
from tests.support.over_grpc import settings as some_settings
from tests.support.proxy import Proxy
from tests.support.served import wait_for


def settings(num_steps):
  return some_settings(
    wait_for_publication=True, num_syncer_steps=num_steps, max_open_rounds=2
  )


def test_a_learner_that_waits_goes_on_to_the_end_that_was_moved(tmp_path):
  with served_run(settings(40), tmp_path / "1") as first:
    proxy = Proxy(first.address)
    try:
      ada = LoopLearner(proxy.address, "ada", paced(0.02))
      with learners(ada):
        wait_for(lambda: len(ada.steps) >= 8)
        proxy.redirect("127.0.0.1:9")  # Nobody answers there.
        proxy.cut()
        wait_for(
          lambda: (
            not any(m.connected for m in first.syncer._state.learners.values())
          )
        )
        shutil.copytree(tmp_path / "1", tmp_path / "2")  # As a kill leaves it.
        with served_run(settings(60), tmp_path / "2", restore=True) as second:
          proxy.redirect(second.address)

          finished = second.wait(60.0)
          assert second.status().t == 60
          assert finished.exit_code == 0
          ada.end()
    finally:
      proxy.close()
  assert ada.steps == list(range(1, 61))
