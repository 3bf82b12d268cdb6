"""A syncer that falls back to its last checkpoint while its learners live on.

The learners reach it through a proxy: what they lose is one syncer, what they
find is another one that was restored from a copy of the first one's directory.
"""

import contextlib
import shutil

import numpy as np
import pytest

from ddiloco_jax.launch.relay import Relay
from ddiloco_jax.learner.learner import LearnerConfig
from ddiloco_jax.learner.patience import Stopped
from tests.support import receipts
from tests.support.over_grpc import (
  SHAPES,
  LoopLearner,
  digest_of,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.quadratic import Gate, Quadratic
from tests.support.served import wait_for

ROLLS_BACK = {
  "run__durability": "snapshot",
  "run__checkpoint_every_s": 1000.0,
}


def test_learners_outlive_a_rollback_whose_saved_counts_exceed_theirs(tmp_path):
  cfg = settings(quorum=2, cycle_steps=24, **ROLLS_BACK)
  with served_run(cfg, tmp_path / "1") as first, proxied(first) as proxy:
    gate = Gate(0.02)
    two = [
      LoopLearner(proxy.address, name, Quadratic(SHAPES, 1.0, 0.05, gate))
      for name in ("ada", "bob")
    ]
    with learners(*two):
      wait_for(lambda: min(versions(first)) >= 2)
      wait_for(lambda: min(steps_of(first, 0)) > 15)
      before = steps_of(first, 0)  # And so saved.
      saved = save_and_copy(first, tmp_path / "2")
      with served_run(cfg, saved, restore=True) as second:
        start = versions(second)
        wait_for(lambda: versions(first)[0] >= start[0] + 2)
        wait_for(lambda: has_adopted(two, 0, versions(first)[0]))
        gate.shut(2)  # Few steps after it, and no more.
        proxy.redirect(second.address)
        proxy.cut()

        wait_for(lambda: joined_epoch(two, 2))
        # As long as the syncer believed the saved counts, this was a fault.
        assert max(steps_of(second, 0)) < min(before)
        gate.open()
        wait_for(lambda: min(versions(second)) >= max(start) + 3)
        assert [each.error for each in two] == [None, None]
        second.request_stop()
        assert second.wait().exit_code == 0
        state = state_of(second)
        for each in two:
          each.end()
  assert digest_of(two[0].trainer.params) == digest_of(two[1].trainer.params)
  assert state.counters.get("refused/rolled_back", 0) == 0
  merges = receipts.read(saved / "tape.jsonl").merges
  assert sum(len(inputs) == 2 for _, _, inputs in merges) >= 4


def test_a_version_that_was_fetched_and_rolled_back_is_not_adopted(tmp_path):
  cfg = settings(quorum=1, **ROLLS_BACK)
  gate = Gate()
  with served_run(cfg, tmp_path / "1") as first, proxied(first) as proxy:
    ada = LoopLearner(proxy.address, "ada", paced(0.03, shapes=SHAPES))
    bob = LoopLearner(proxy.address, "bob", Quadratic(SHAPES, 1.0, 0.05, gate))
    with learners(ada, bob):
      wait_for(lambda: min(versions(first)) >= 2)
      saved = save_and_copy(first, tmp_path / "2")
      with served_run(cfg, saved, restore=True) as second:
        start = versions(second)
        gate.shut()  # bob stays in his step; his link goes on.
        lost = [n + 2 for n in start]
        wait_for(lambda: all(n >= m for n, m in zip(versions(first), lost)))
        wait_for(lambda: len(bob.link._shared.ready) == 2)
        num_adopted = len(bob.adopted)
        proxy.redirect(second.address)
        proxy.cut()
        wait_for(lambda: joined_epoch([ada, bob], 2))
        gate.open()

        wait_for(lambda: min(versions(second)) >= max(start) + 3)
        wait_for(lambda: len(bob.adopted) >= num_adopted + 4)
        assert (ada.error, bob.error) == (None, None)
        second.request_stop()
        assert second.wait().exit_code == 0
        for each in (ada, bob):
          each.end()
  for p, version, *_ in bob.adopted[num_adopted:]:
    assert version.epoch == 2 or version.n <= start[p]
  assert digest_of(ada.trainer.params) == digest_of(bob.trainer.params)


def test_a_cut_right_after_a_rollback_has_the_learner_at_its_clock(tmp_path):
  # The number of the cut, too, was one of the epoch that is lost.
  cfg = settings(quorum=1, **ROLLS_BACK)
  gate, parts = Gate(0.02), []

  def save(part, tell):
    parts.append(part)
    tell(None)

  with served_run(cfg, tmp_path / "1") as first, proxied(first) as proxy:
    trainer = Quadratic(SHAPES, 1.0, 0.05, gate)
    bob = LoopLearner(proxy.address, "bob", trainer, save_cut=save)
    with learners(bob):
      wait_for(lambda: min(versions(first)) >= 2)
      saved = save_and_copy(first, tmp_path / "2")
      with served_run(cfg, saved, restore=True) as second:
        lost = [n + 2 for n in versions(second)]
        wait_for(lambda: all(n >= m for n, m in zip(versions(first), lost)))
        before = first.syncer.take_snapshot()
        gate.shut()  # bob stays in his step; his link goes on.
        proxy.redirect(second.address)
        proxy.cut()
        wait_for(lambda: joined_epoch([bob], 2))
        second.syncer.request_snapshot()
        wait_for(lambda: bob.link.marker() is not None)
        gate.open()

        over = second.syncer.take_snapshot()
        assert bob.error is None
  assert before.snapshot == over.snapshot == 1
  assert (over.learners, over.skipped) == (("bob",), ())
  assert parts[-1].versions == over.clock


def test_a_learner_that_the_restored_syncer_never_saw_gets_a_shard(tmp_path):
  # bob has taken ada's shard before she is back: she goes on in another one.
  cfg = settings(quorum=1, **ROLLS_BACK)
  read = []

  def make_batches(shard):
    def batch(position):
      read.append((shard, position))
      return {"weights": np.ones(100, np.float32)}

    return batch

  with served_run(cfg, tmp_path / "1") as first, proxied(first) as proxy:
    saved = save_and_copy(first, tmp_path / "2")
    ada = LoopLearner(
      proxy.address, "ada", paced(0.02, shapes=SHAPES), make_batches
    )
    with learners(ada):
      wait_for(lambda: len(ada.steps) >= 10)
      assert {shard for shard, _ in read} == {0}
      with served_run(cfg, saved, restore=True) as second:
        bob = LoopLearner(second.address, "bob", paced(0.02, shapes=SHAPES))
        with learners(bob):
          wait_for(lambda: bob.steps)
          proxy.redirect(second.address)
          proxy.cut()
          wait_for(lambda: read[-1][0] == 1)
          start = len(read)
          wait_for(lambda: len(read) >= start + 20)
          wait_for(lambda: contributors(second) == {"ada", "bob"})

  assert ada.error is None
  assert {shard for shard, _ in read[start:]} == {1}
  assert [p for s, p in read if s == 1] == list(range(len(read) - start + 1))


def test_what_was_said_to_nobody_is_said_again(tmp_path):
  # Its data is used up while no syncer is there: said once, heard by none.
  cfg = settings(quorum=1, quorum_timeout_s=60.0)
  with served_run(cfg, tmp_path / "1") as run, proxied(run) as proxy:
    ada = LoopLearner(
      proxy.address,
      "ada",
      paced(0.02, shapes=SHAPES),
      cfg=LearnerConfig(max_steps=60),
    )
    with learners(ada):
      wait_for(lambda: len(ada.steps) >= 20)
      proxy.redirect("127.0.0.1:9")  # Nobody answers there.
      proxy.cut()
      wait_for(lambda: len(ada.steps) == 60)
      proxy.redirect(run.address)

      assert "exhausted" in run.wait(30.0).reason
      ada.end()


def test_a_learner_that_waits_for_a_publication_can_be_stopped(tmp_path):
  cfg = settings(quorum=2, wait_for_publication=True, num_syncer_steps=100)
  with served_run(cfg, tmp_path / "1") as run:
    ada = LoopLearner(run.address, "ada", paced(0.01, shapes=SHAPES))
    with learners(ada):
      wait_for(
        lambda: any(each.waiting for each in state_of(run).learners.values())
      )
      ada.stop()

      assert "told to stop" in ada.end(10.0)


def test_a_learner_that_is_not_answered_can_be_stopped(tmp_path):
  with served_run(settings(), tmp_path / "1") as run, proxied(run) as proxy:
    ada = LoopLearner(
      proxy.address,
      "ada",
      paced(0.01, shapes=SHAPES),
      wrap=lambda client: Unanswered(client, proxy),
    )
    with learners(ada):
      wait_for(lambda: ada.link._threads)
      ada.stop()
      wait_for(lambda: ada.error)

      with pytest.raises(Stopped):
        ada.end()


def test_an_end_that_was_rolled_back_is_withdrawn(tmp_path):
  cfg = settings(quorum=1, acknowledge_s=200.0, **ROLLS_BACK)
  gate = Gate()
  with served_run(cfg, tmp_path / "1") as first, proxied(first) as proxy:
    ada = LoopLearner(proxy.address, "ada", paced(0.03, shapes=SHAPES))
    bob = LoopLearner(proxy.address, "bob", Quadratic(SHAPES, 1.0, 0.05, gate))
    with learners(ada, bob):
      wait_for(lambda: min(versions(first)) >= 2)
      saved = save_and_copy(first, tmp_path / "2")
      gate.shut()  # bob acknowledges no end: the first run cannot finish.
      first.syncer.request_stop("killed in its flush")
      wait_for(lambda: ada.link.ending() and bob.link.ending())
      with served_run(cfg, saved, restore=True) as second:
        start, last = versions(second), ada.steps[-1]
        proxy.redirect(second.address)
        proxy.cut()
        wait_for(lambda: joined_epoch([ada, bob], 2))
        gate.open()

        wait_for(lambda: min(versions(second)) >= max(start) + 3)
        wait_for(lambda: ada.steps[-1] > last + 3)
        assert (ada.error, bob.error) == (None, None)
        second.request_stop()
        assert second.wait().exit_code == 0
        for each in (ada, bob):
          each.end()
  assert ada.steps == list(range(1, len(ada.steps) + 1))
  assert digest_of(ada.trainer.params) == digest_of(bob.trainer.params)


class Unanswered:
  """A client whose join is never answered."""

  def __init__(self, client, proxy):
    self._client, self._proxy = client, proxy

  def join(self, hello):
    self._proxy.hold_answers()
    return self._client.join(hello)

  def __getattr__(self, name):
    return getattr(self._client, name)


@contextlib.contextmanager
def proxied(run):
  with contextlib.closing(Relay(run.address)) as proxy:
    yield proxy


def save_and_copy(run, directory):
  """What a syncer finds that is started after one that was killed now."""
  run.run._save()
  run.run.store.wait()
  shutil.copytree(run.directory, directory)
  return directory


def state_of(run):
  return run.syncer.snapshot()[1]


def versions(run):
  return [f.version.n for f in run.status().fragments]


def contributors(run):
  return {
    member.learner
    for fragment in state_of(run).fragments
    for member in fragment.contributors
  }


def steps_of(run, p):
  """Per learner, what the syncer knows of its steps since the last adoption."""
  return [each.counts[p].steps for each in state_of(run).learners.values()]


def has_adopted(loops, p, n):
  return all(
    any(f == p and version.n >= n for f, version, *_ in each.adopted)
    for each in loops
  )


def joined_epoch(loops, epoch):
  return all(
    each.adopted and each.link.welcome.epoch == epoch for each in loops
  )
