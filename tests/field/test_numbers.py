"""Counts of zero, numbers that are none, tokens and weights, over real gRPC."""

import dataclasses
import math
import time

import numpy as np
import pytest

from ddiloco_jax.learner.client import Client
from ddiloco_jax.protocol import events, tape
from ddiloco_jax.protocol.rules import Rules
from tests.support.numpy_learner import SPOILS, NumpyLearner, Spoil
from tests.support.over_grpc import (
  THETA,
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
  strict_lines,
)
from tests.support.quadratic import constant_batches
from tests.support.receipts import read
from tests.support.served import Served, wait_for

RULES = Rules(
  num_fragments=2, cycle_steps=4, min_deadline_s=0.3, acknowledge_s=10.0
)
NO_STEPS = Spoil(
  header=lambda h: dataclasses.replace(h, counts=events.Counts(0, 100))
)


def run_with(*, quorum=1, **each):
  """A syncer and NumpyLearners by name, started."""
  run = Served(THETA, dataclasses.replace(RULES, quorum=quorum))
  made = {
    name: NumpyLearner(run.client(name), name, **how)
    for name, how in each.items()
  }
  for learner in made.values():
    learner.start()
  return run, made


def close(run, made):
  for learner in made.values():
    learner.kill()
  run.close()


@pytest.mark.parametrize("how", [{"tokens": 0}, {"spoil": NO_STEPS}])
def test_replies_of_no_weight_are_not_merged_and_not_asked_for_in_a_loop(how):
  # [N7] All token counts 0, or all step counts.
  run, made = run_with(ada=how, bob=how)
  try:
    wait_for(lambda: run.all_of(events.GiveUp))
    start = time.monotonic()
    num_events, num_pulls = len(run.events), len(run.all_of(events.Pull))
    time.sleep(2.0)
    took_s = time.monotonic() - start
    num_events = len(run.events) - num_events
    num_pulls = len(run.all_of(events.Pull)) - num_pulls
    waits = run.syncer.status().waiting_for
    errors = [m.error for m in made.values()]
  finally:
    close(run, made)

  assert not run.all_of(events.Merge)
  assert errors == [None, None]
  # Two learners report 50 times a second, and tau = 2 rounds are open, each
  # of them for at least its deadline.
  assert num_pulls <= 2 * 2 * (took_s / RULES.min_deadline_s + 1)
  assert num_events <= 2 * 50 * took_s + 20 * num_pulls + 100
  assert waits


def test_replies_of_no_weight_do_not_count_in_a_mixture():
  # [N7] Three that say nothing, and one that has learned something.
  run, made = run_with(
    none={"tokens": 0},
    still={"spoil": NO_STEPS},
    ada={},
  )
  try:
    made["ada"].wait_for(lambda: made["ada"].num_included() >= 6)
    tensors, _ = run.syncer.snapshot()
  finally:
    close(run, made)

  weights: dict[str, set[float]] = {}
  for merge in run.all_of(events.Merge):
    for item in merge.inputs:
      weights.setdefault(item.key.learner, set()).add(item.weight)
  assert min(weights.pop("ada")) > 0
  assert all(values == {0.0} for values in weights.values())
  for part in tensors.theta:
    for array in part.values():
      assert np.isfinite(array).all()
      assert (array > 0).all()


class Diverged:
  """Trains well, and says that it does not."""

  def __init__(self, trainer):
    self._trainer = trainer

  def __getattr__(self, name):
    return getattr(self._trainer, name)

  def step(self, batch, index):
    self._trainer.step(batch, index)
    return {"loss": math.nan, "grad_norm": math.inf}


def test_no_file_of_a_run_knows_nan(tmp_path):
  # [N8] NaN, Inf and 1e30 are pushed, and a loss is NaN.
  cfg = settings(quorum=2, num_syncer_steps=60)

  with served_run(cfg, tmp_path / "run") as run:
    honest = [
      LoopLearner(run.address, "ada", paced(0.03)),
      LoopLearner(run.address, "bob", Diverged(paced(0.03))),
    ]
    hostile = [
      NumpyLearner(
        Client(run.address, learner=name),
        name,
        step_s=0.03,
        spoil=SPOILS[name],
      )
      for name in ("nan", "inf", "huge")
    ]
    for learner in hostile:
      learner.start()
    with learners(*honest):
      finished = run.wait(60.0)
      for learner in honest:
        learner.end()
    status = run.status()
    for learner in hostile:
      learner.kill()

  assert finished.exit_code == 0
  assert len(strict_lines(tmp_path / "run" / "tape.jsonl")) > 100
  lines = strict_lines(tmp_path / "run" / "metrics.jsonl")
  assert {"ada", "bob"} >= {
    name for line in lines for name in line.get("contributors", ())
  }
  refused = sum(n for k, n in status.counters.items() if "refused" in k)
  assert refused >= 3
  assert status.counters["refused/not_finite"] >= 1
  for theta in honest:
    params = theta.trainer.params
    for array in params.values():
      np.testing.assert_allclose(array, 1.0, atol=0.7)


def test_tokens_of_one_to_three_weigh_one_to_nine(tmp_path):
  # [N9] Equal steps; the project's own loop counts the tokens.
  cfg = settings(quorum=2, num_syncer_steps=40)
  with served_run(cfg, tmp_path / "run") as run:
    pair = [
      LoopLearner(run.address, name, paced(0.03), constant_batches(tokens))
      for name, tokens in (("one", 100), ("three", 300))
    ]
    with learners(*pair):
      run.wait(60.0)
    books = {book.name: book.tokens for book in run.status().books}

  path = tmp_path / "run" / "tape.jsonl"
  counts = replied_counts(path)
  merges = read(path).merges
  # A flush round may find only one of them with a step since its adoption.
  assert sum(len(inputs) == 2 for _, _, inputs in merges) >= 8
  for p, _, inputs in merges:
    weights = {who.learner: weight for who, _, weight in inputs}
    for learner, weight in weights.items():
      rate = {"one": 100, "three": 300}[learner]
      steps = weight / rate**2
      assert (
        events.Counts(round(steps), round(rate * steps)) in (counts[learner, p])
      )
  discarded = sum(v for k, v in books.items() if k.startswith("discarded"))
  assert books["reported"] == pytest.approx(
    books["merged"] + discarded + books["pending"]
  )


def replied_counts(path):
  found = {}
  for line in tape.Reader(path).lines():
    if isinstance(line.event, events.Replied):
      key = line.event.learner, line.event.fragment
      found.setdefault(key, []).append(line.event.counts)
  return found
