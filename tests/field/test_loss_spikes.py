"""A learner whose loss leaves its course starts over from the global state."""

import math
import threading

import numpy as np
import pytest

from ddiloco_jax.learner.learner import LearnerConfig
from ddiloco_jax.learner.spikes import NUM_ABOVE, NUM_BEFORE, Spikes
from ddiloco_jax.protocol import events, tape
from tests.support.over_grpc import (
  SHAPES,
  LoopLearner,
  learners,
  served_run,
  settings,
)
from tests.support.quadratic import Momentum
from tests.support.served import wait_for


class Diverging(Momentum):
  """Its parameters and its inner state go wrong in one step of its life."""

  def __init__(self, at, to):
    wait = threading.Event().wait
    super().__init__(SHAPES, 1.0, 0.05, lambda: wait(0.01))
    self._at = at
    self._to = np.float32(to)

  def step(self, batch, index):
    if len(self.indices) == self._at:
      self.params = {p: x + self._to for p, x in self.params.items()}
      self.mean = {p: x + self._to for p, x in self.mean.items()}
    # One more, so that its course is not within rounding of nothing.
    return {"loss": super().step(batch, index)["loss"] + 1.0}


@pytest.mark.parametrize("to", [math.nan, 50.0])
def test_a_loss_spike_costs_what_was_not_merged_and_no_more(tmp_path, to):
  read = []

  def make_batches(shard):
    def batch(position):
      read.append((shard, position))
      return {"weights": np.ones(100, np.float32)}

    return batch

  cfg = LearnerConfig(loss_spike_factor=3.0)
  with served_run(settings(quorum=1), tmp_path) as run:
    bob = LoopLearner(run.address, "bob", Diverging(-1, 0), state_address="")
    ada = LoopLearner(
      run.address,
      "ada",
      Diverging(60, to),
      make_batches,
      cfg,
      state_address="",
    )
    first = {}
    with learners(bob, ada):
      wait_for(lambda: ada.steps)
      first = ada.link.welcome.session
      wait_for(lambda: ada.link.welcome.session.incarnation > first.incarnation)
      begun = len(ada.steps)
      wait_for(lambda: len(ada.steps) >= begun + 40)
      wait_for(
        lambda: all(
          np.all(np.abs(x - 1.0) < 0.2) for x in ada.trainer.params.values()
        )
      )
      assert (ada.error, bob.error) == (None, None)
    state = run.syncer.snapshot()[1]

  told = [x.event for x in tape.Reader(tmp_path / "tape.jsonl").lines()]
  left = [x for x in told if isinstance(x, events.Left) and x.learner == "ada"]
  assert "the loss is" in left[0].reason
  recovered = [x for x in told if isinstance(x, events.Recovered)]
  assert [x.donor for x in recovered if x.learner == "ada"][-1:] == ["bob"]
  lost = 0
  for account in state.accounts["ada"]:
    books = dict(account.discarded)
    lost += books.get("learner_lost", events.ZERO)[1]
  assert lost > 0
  # What was dropped is not read again: it may be what made the loss so.
  assert len(read) == len(set(read))
  for account in (*state.accounts["ada"], *state.accounts["bob"]):
    booked = sum(tokens for _, (_, tokens) in account.discarded)
    assert account.reported[1] == account.merged[1] + booked


def test_a_learner_that_starts_over_as_the_run_finishes_ends_with_it(tmp_path):
  with served_run(settings(quorum=1), tmp_path) as run:
    bob = LoopLearner(run.address, "bob", Diverging(-1, 0))
    ada = LoopLearner(
      run.address,
      "ada",
      Diverging(60, math.nan),
      cfg=LearnerConfig(loss_spike_factor=3.0),
      recover_s=0.0,
    )
    start_over = ada.link.start_over

    def start_over_late(reason):
      run.syncer.request_stop("maintenance")
      wait_for(lambda: ada.link.finished())
      start_over(reason)

    ada.link.start_over = start_over_late
    with learners(bob, ada):
      run.wait()

      assert "maintenance" in ada.end()


def test_a_course_is_left_by_several_losses_or_one_that_is_none():
  spikes = Spikes(2.0)
  for _ in range(NUM_BEFORE):
    assert spikes.look(1.0) is None
  for loss in (9.0, 9.0, 1.9, 9.0, 9.0):
    assert spikes.look(loss) is None
  assert "9" in (spikes.look(9.0) or "")
  # A new course begins: however bad the data, it does not start over at once.
  seen = [spikes.look(math.nan) for _ in range(NUM_BEFORE + 1)]
  assert seen[:-1] == [None] * NUM_BEFORE
  assert seen[-1] == "the loss is nan"
  assert NUM_ABOVE == 3


def test_no_loss_is_a_spike_unless_asked_for():
  spikes = Spikes(0.0)
  assert {spikes.look(x) for x in [1.0] * 50 + [math.nan, 1e30]} == {None}
