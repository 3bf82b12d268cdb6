"""Many, hostile and vanishing learners of plain numpy over real gRPC.

The names in brackets are those of public fault reports: what users of such
systems ran into, as a kind.
"""

import dataclasses
import time

import numpy as np
import pytest

from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.wire.options import WireConfig
from ddiloco_jax.wire.tokens import ONLOOKER
from tests.support.numpy_learner import SPOILS, NumpyLearner
from tests.support.served import Served, wait_for

THETA = {
  "a": np.zeros((3, 4), np.float32),
  "b": np.zeros(5, np.float32),
}
RULES = Rules(num_fragments=2, cycle_steps=4, acknowledge_s=10.0)


@pytest.fixture
def make_run():
  runs, learners = [], []

  def make(theta=THETA, cfg: WireConfig | None = None, **changes) -> Served:
    rules = dataclasses.replace(RULES, **changes)
    run = Served(theta, rules, learning_rate=0.7, cfg=cfg)
    runs.append(run)
    return run

  def start(run: Served, name: str, **settings) -> NumpyLearner:
    learner = NumpyLearner(run.client(name), name, **settings)
    learners.append(learner)
    learner.start()
    return learner

  make.start = start
  yield make
  for learner in learners:
    learner.kill()
  for run in runs:
    run.close()


def test_two_learners_train_until_the_run_ends(make_run):
  run = make_run(num_syncer_steps=60, quorum=2)
  learners = [make_run.start(run, name) for name in ("ada", "bob")]

  for learner in learners:
    learner.wait_for(lambda learner=learner: learner.finished, 30.0)
  tensors, _ = run.syncer.snapshot()

  assert [learner.finished.exit_code for learner in learners] == [0, 0]
  for theta in tensors.theta:
    for path, array in theta.items():
      np.testing.assert_allclose(array, 1.0, atol=0.2)
      for learner in learners:
        np.testing.assert_array_equal(learner.theta[path], array)


def test_a_round_of_forty_learners_completes_and_status_answers_meanwhile(
  make_run,
):
  # [T12] Thirty-nine wait for the fortieth.
  run = make_run(quorum=40, max_learners=64, num_shards=64)
  learners = [make_run.start(run, f"l{i}", step_s=0.2) for i in range(39)]
  watcher = run.client(ONLOOKER)
  wait_for(lambda: watcher.status().num_training == 39, 30.0)

  start = time.monotonic()
  status = watcher.status()
  waited_s = time.monotonic() - start
  learners.append(make_run.start(run, "last", step_s=0.2))
  wait_for(lambda: run.all_of(events.Merge), 60.0)

  assert waited_s < 1.0
  assert "40" in status.waiting_for
  assert len(run.all_of(events.Merge)[0].inputs) == 40


def test_what_the_run_waits_for_is_said_at_once(make_run):
  # [M2] quorum 3, two learners.
  run = make_run(quorum=3, lease_s=2.0, quorum_timeout_s=3.0)
  learners = [make_run.start(run, name) for name in ("ada", "bob")]
  wait_for(lambda: run.sync.status().num_training == 2)

  said = run.sync.status().waiting_for
  finished = run.syncer.wait(20.0)

  assert "2" in said
  assert "3" in said
  assert finished.exit_code != 0
  for learner in learners:
    learner.wait_for(lambda learner=learner: learner.finished)


@pytest.mark.parametrize(
  ("spoil", "outcomes"),
  [
    ("forged", {"UNAUTHENTICATED"}),
    ("not_asked", {"refused"}),
    ("old_incarnation", {"UNAUTHENTICATED", "ABORTED"}),
    ("nan", {"refused"}),
    ("inf", {"refused"}),
  ],
)
def test_a_hostile_learner_is_refused_and_moves_nothing(
  make_run, spoil, outcomes
):
  # [M4, N8] Alone, so that whatever it does would show.
  run = make_run(min_deadline_s=0.5)
  hostile = make_run.start(run, "eve", spoil=SPOILS[spoil])

  hostile.wait_for(lambda: len(hostile.results) >= 2)
  tensors, _ = run.syncer.snapshot()

  assert set(hostile.outcomes()) <= outcomes
  assert not run.all_of(events.Merge)
  for theta in tensors.theta:
    for path, array in theta.items():
      np.testing.assert_array_equal(array, THETA[path])


def test_honest_learners_go_on_beside_hostile_ones(make_run):
  # [N8] One sends NaN, one Inf, one a norm of 1e30.
  run = make_run(quorum=2)
  for name in ("nan", "inf", "huge"):
    make_run.start(run, name, spoil=SPOILS[name])
  honest = [make_run.start(run, name) for name in ("ada", "bob")]

  # Eight accepted replies of each fragment: from then on a median judges even
  # a reply that has no other beside it, as in the flush at the end.
  wait_for(lambda: min(f.version.n for f in run.sync.status().fragments) >= 8)
  run.syncer.request_stop("enough")
  for learner in honest:
    learner.wait_for(lambda learner=learner: learner.finished, 60.0)
  tensors, _ = run.syncer.snapshot()
  status = run.syncer.status()

  assert all(learner.num_included() >= 3 for learner in honest)
  merged = {
    item.key.learner
    for merge in run.all_of(events.Merge)
    for item in merge.inputs
  }
  assert merged == {"ada", "bob"}
  assert sum(n for k, n in status.counters.items() if "refused" in k) >= 3
  for theta in tensors.theta:
    for array in theta.values():
      np.testing.assert_allclose(array, 1.0, atol=0.3)


def test_a_reply_pushed_twice_is_merged_once(make_run):
  # [N5] The answer was lost, and the learner asks again.
  run = make_run()
  learner = make_run.start(run, "ada", spoil=SPOILS["twice"])

  learner.wait_for(lambda: len(learner.results) >= 8)

  outcomes = learner.outcomes()
  assert outcomes[:8:2] == ["accepted"] * 4
  assert outcomes[1:8:2] == ["duplicate"] * 4
  inputs = [
    item.key for merge in run.all_of(events.Merge) for item in merge.inputs
  ]
  assert len(inputs) == len(set(inputs))


def test_one_killed_learner_does_not_hold_up_the_rounds(make_run):
  # [M3, M1] Gone without a goodbye; the others' rounds go on.
  run = make_run(quorum=1, lease_s=1.0)
  learners = [make_run.start(run, f"l{i}") for i in range(4)]
  for learner in learners:
    learner.wait_for(lambda learner=learner: learner.num_included() >= 1)

  learners[0].kill()
  merges = len(run.all_of(events.Merge))
  wait_for(lambda: len(run.all_of(events.Merge)) >= merges + 4)
  wait_for(lambda: run.sync.status().num_live == 3)

  gone = len(run.all_of(events.Merge))

  def merged() -> set[str]:
    merges = run.all_of(events.Merge)[gone:]
    return {item.key.learner for merge in merges for item in merge.inputs}

  wait_for(lambda: merged() >= {"l1", "l2", "l3"})
  assert "l0" not in merged()


def test_a_learner_that_comes_back_takes_part_again(make_run):
  run = make_run()
  first = make_run.start(run, "ada")
  first.wait_for(lambda: first.num_included() >= 1)
  first.kill()

  second = make_run.start(run, "ada", takeover=True)
  second.wait_for(lambda: second.num_included() >= 2)

  assert second.welcomes[0].positions[0].batch > 0
  assert second.welcomes[0].session.incarnation > (
    first.welcomes[0].session.incarnation
  )


def test_weights_follow_tokens_and_speed(make_run):
  # [N9] Tokens 1:3 at equal steps weigh 1:9.
  run = make_run(quorum=2)
  one = make_run.start(run, "one", tokens=100)
  three = make_run.start(run, "three", tokens=300)
  one.wait_for(lambda: one.num_included() >= 2)
  three.wait_for(lambda: three.num_included() >= 2)

  replies = {
    (e.learner, e.fragment, e.round): e.counts
    for e in run.all_of(events.Replied)
  }
  merge = run.all_of(events.Merge)[0]

  for item in merge.inputs:
    steps, tokens = replies[item.key.learner, merge.fragment, merge.round]
    rate = {"one": 100, "three": 300}[item.key.learner]
    assert tokens == rate * steps
    assert item.weight == pytest.approx(steps * rate**2)


@pytest.mark.parametrize(
  "rows",
  [
    {"big": 4},  # 16 MiB, four times gRPC's limit.
    pytest.param(
      {"big": 16, "more": 16, "rest": 18},  # Leaves of 64 MiB, 200 MiB in all.
      marks=[pytest.mark.slow, pytest.mark.timeout(600)],
    ),
  ],
)
def test_leaves_beyond_any_message_limit_travel_by_default(make_run, rows):
  # [T1]
  theta = {path: np.zeros((n, 1 << 20), np.float32) for path, n in rows.items()}
  theta["small"] = np.zeros(3, np.float32)
  run = make_run(theta, num_syncer_steps=8)
  learner = make_run.start(run, "ada", step_s=0.1)

  learner.wait_for(lambda: learner.finished, 300.0)

  assert learner.num_included() >= 2
  assert learner.finished.exit_code == 0
  tensors, _ = run.syncer.snapshot()
  for theta in tensors.theta:
    for path, array in theta.items():
      np.testing.assert_array_equal(learner.theta[path], array)
