"""A learner that dies and comes back: global parameters, its own data, once."""

import collections
import json
import signal

import numpy as np
import pytest

from ddiloco_jax import config
from ddiloco_jax.launch import exits, syncing
from ddiloco_jax.protocol import events, tape
from tests.support import small
from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.processes import TRAIN, ending, module, overrides
from tests.support.served import wait_for

TOKENS = 100


@pytest.mark.parametrize("seed", [1, 2])
def test_no_example_counts_twice_however_often_a_learner_dies(tmp_path, seed):
  # [D1] Five lives of one id, each ended without a word.
  random = np.random.default_rng(seed)
  cfg = settings(quorum=1, num_fragments=2, cycle_steps=6, lease_s=3.0)
  read_positions: list[list[int]] = []

  def make_batches(shard):
    read: list[int] = []
    read_positions.append(read)

    def batch(position):
      read.append(position)
      return {"weights": np.ones(TOKENS, np.float32)}

    return batch

  with served_run(cfg, tmp_path / "run") as run:
    with learners(LoopLearner(run.address, "other", paced(0.03))):
      for life in range(5):
        learner = LoopLearner(
          run.address, "mortal", paced(0.02), make_batches, takeover=True
        )
        with learners(learner):
          wait_for_steps(learner, random.integers(10, 40))
          if life < 4:
            learner.kill()
          else:
            wait_for_versions(run, 4)
            run.request_stop()
            run.wait(30.0)
    state = run.syncer.snapshot()[1]

  check_positions(tmp_path / "run" / "tape.jsonl", state, read_positions)


def wait_for_steps(learner, num):
  start = len(learner.steps)
  wait_for(lambda: len(learner.steps) >= start + num)


def wait_for_versions(run, num):
  def version():
    return sum(f.version.n for f in run.status().fragments)

  start = version()
  wait_for(lambda: version() >= start + num)


def check_positions(path, state, read_positions):
  replies, merged = {}, []
  starts, accepted = [], 0
  for line in tape.Reader(path).lines():
    event = line.event
    if isinstance(event, events.Replied) and event.learner == "mortal":
      key = (event.fragment, event.round, event.attempt, event.incarnation)
      replies[key] = event
    for effect in line.effects:
      if isinstance(effect, events.Welcome) and effect.learner == "mortal":
        starts.append((effect.positions[0].batch, accepted))
      if isinstance(effect, events.Resolved):
        taken = effect.outcome in (
          events.Outcome.ACCEPTED,
          events.Outcome.CARRIED,
        )
        if taken and effect.key.learner == "mortal":
          accepted = max(accepted, event.positions[0].batch)
      if isinstance(effect, events.Merge):
        merged += [i.key for i in effect.inputs if i.key.learner == "mortal"]

  # Each life reads on from the accepted position, without a gap.
  assert len(starts) == 5
  for batch, expected in starts:
    assert batch == expected
  for read, (batch, _) in zip(read_positions, starts, strict=True):
    assert read == list(range(batch, batch + len(read)))
  assert len({batch for batch, _ in starts}) >= 3
  covered = collections.defaultdict(list)
  for key in merged:
    reply = replies[key.fragment, key.round, key.attempt, key.incarnation]
    end, steps = reply.positions[0].batch, reply.counts.steps
    covered[key.fragment] += range(end - steps, end)
  accounts = state.accounts["mortal"]
  for p, positions in covered.items():
    assert len(positions) == len(set(positions)), f"fragment {p} counts twice"
    merged_tokens = accounts[p].merged.tokens
    assert merged_tokens == TOKENS * len(positions)
    holes = set(range(accepted)) - set(positions)
    discarded = sum(counts.tokens for _, counts in accounts[p].discarded)
    assert TOKENS * len(holes) <= discarded


@pytest.mark.slow
def test_a_process_that_is_killed_comes_back_by_takeover(tmp_path):
  # Fresh moments, warmed up again; global fragments; its own data.
  editable = small.get_config()
  editable.run.log_every_steps = 1
  cfg = config.freeze(editable)
  run_dir = tmp_path / "run"
  theta = syncing.init_params(cfg)
  shapes = {path: array.shape for path, array in theta.items()}
  with served_run(cfg, run_dir, theta=theta) as run, ending() as start:

    def of(name):
      found = {m.learner: m for m in run.status().learners}
      return found.get(name)

    def life(number, *flags):
      return start(
        module(
          TRAIN,
          "--config=tests/support/small.py",
          f"--run_dir={run_dir}",
          f"--syncer={run.address}",
          "--learner_id=mortal",
          *overrides(train__decay_steps=10**6),
          *flags,
        ),
        tmp_path / f"{number}.log",
      )

    other = LoopLearner(run.address, "other", paced(0.05, shapes=shapes))
    with learners(other):
      first = life(1)
      first.wait_for(lambda: of("mortal") and of("mortal").step >= 60, 120.0)
      # A second process of a live id is refused, unless it takes over.
      refused = life(0)
      code = refused.wait(120.0)
      assert code == exits.FAILED, refused.said()
      assert "--takeover" in refused.said()
      assert first.is_running()
      first.signal(signal.SIGKILL)
      first.wait()
      lines = (run_dir / "learners/mortal/metrics.jsonl").read_text()

      second = life(2, "--takeover")
      second.wait_for(
        lambda: of("mortal").incarnation >= 3 and of("mortal").step >= 30,
        120.0,
      )
      third = life(3, "--takeover")
      fenced = second.wait(120.0)
      third.wait_for(lambda: of("mortal").step >= 5, 120.0)
      third.signal(signal.SIGTERM)
      assert third.wait() == exits.OK

  assert fenced == exits.FENCED, second.said()
  before = rates(lines)
  after = rates(
    (run_dir / "learners/mortal/metrics.jsonl").read_text()[len(lines) :]
  )
  # The schedule is far beyond its warm-up, and the fresh moments are not.
  assert before[-1] > 0.9 * cfg.train.learning_rate
  assert after[0] < 0.5 * cfg.train.learning_rate
  assert max(after) > 0.9 * cfg.train.learning_rate


def rates(text):
  records = [json.loads(line) for line in text.splitlines()]
  return [r["learning_rate"] for r in records if "learning_rate" in r]
