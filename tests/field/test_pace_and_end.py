"""The cadence that is realised, how a run ends, and what everybody then has."""

import collections
import statistics

import numpy as np
import pytest

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments
from ddiloco_jax.learner.learner import LearnerConfig
from ddiloco_jax.protocol import events, tape
from ddiloco_jax.training.checkpoint import Checkpoints
from tests.support.over_grpc import (
  LoopLearner,
  digest_of,
  learners,
  paced,
  served_run,
  settings,
)


def test_the_realised_cadence_is_the_configured_one_by_default(tmp_path):
  # [N11] H = P = 24 as they come, on loopback.
  editable = config.default()
  editable.sync.num_syncer_steps = 132  # Five and a half cycles.
  cfg = config.freeze(editable)
  theta = {f"layer_{i:02}": np.zeros((i + 1, 3), np.float32) for i in range(30)}
  shapes = {path: array.shape for path, array in theta.items()}

  with served_run(cfg, tmp_path / "run", theta=theta) as run:
    pair = [
      LoopLearner(run.address, name, paced(0.1, lr=1e-3, shapes=shapes))
      for name in ("ada", "bob")
    ]
    with learners(*pair):
      finished = run.wait(90.0)
    told = {f.fragment: f.realised_h for f in run.status().fragments}

  assert finished.exit_code == 0
  seen = realised_h(tmp_path / "run" / "tape.jsonl")
  assert set(seen) == set(range(24))
  for p, h in seen.items():
    assert abs(h - 24) <= 0.2 * 24, f"fragment {p}: {seen}"
    assert abs(told[p] - 24) <= 0.2 * 24, f"fragment {p}: {told}"


def realised_h(path):
  """Fragment -> mean steps in accepted replies of the median learner.

  Without each fragment's first round, and without the flush at the end.
  """
  steps = collections.defaultdict(list)
  first: dict[int, int] = {}
  for line in tape.Reader(path).lines():
    if line.state.end is not None:
      break
    event = line.event
    if not isinstance(event, events.Replied):
      continue
    p = event.fragment
    if event.round == first.setdefault(p, event.round):
      continue
    accepted = any(
      isinstance(e, events.Resolved) and e.outcome == events.Outcome.ACCEPTED
      for e in line.effects
    )
    if accepted:
      steps[p, event.learner].append(event.counts.steps)
  means = collections.defaultdict(list)
  for (p, _), counts in steps.items():
    means[p].append(statistics.mean(counts))
  return {p: statistics.median_high(values) for p, values in means.items()}


@pytest.mark.parametrize("by", ["budget", "data"])
def test_a_run_ends_when_its_learners_have_nothing_left_to_read(tmp_path, by):
  # [N12] The target lies far beyond what they have.
  cfg = settings(num_syncer_steps=100_000, quorum=2)
  loop = LearnerConfig(max_steps=40 if by == "budget" else 0)

  def make_batches(shard):
    def batch(position):
      if by == "data" and position >= 40:
        return None
      return {"weights": np.ones(100, np.float32)}

    return batch

  with served_run(cfg, tmp_path / "run") as run:
    pair = [
      LoopLearner(run.address, name, paced(0.02), make_batches, loop)
      for name in ("ada", "bob")
    ]
    with learners(*pair):
      finished = run.wait(20.0)
      reasons = [learner.end() for learner in pair]
    books = {book.name: book.tokens for book in run.status().books}

  assert finished.exit_code == 0
  assert "input_exhausted" in finished.reason
  assert all("input_exhausted" in reason for reason in reasons)
  # The run ends with the first of the two: K of them no longer read.
  steps = [learner.steps[-1] for learner in pair]
  assert max(steps) == 40
  assert min(steps) >= 30
  assert finished.missing == ()
  assert books["reported"] == sum(steps) * 100
  assert books["pending"] == 0


def test_a_run_goes_on_while_a_quorum_still_reads(tmp_path):
  # [N12] One learner is through early; it stays, answers and adopts.
  cfg = settings(quorum=1, num_syncer_steps=80)
  with served_run(cfg, tmp_path / "run") as run:
    short = LoopLearner(
      run.address, "short", paced(0.03), cfg=LearnerConfig(max_steps=15)
    )
    long = LoopLearner(run.address, "long", paced(0.03))
    with learners(short, long):
      finished = run.wait(30.0)
      short.end()
      long.end()

  assert "num_syncer_steps" in finished.reason
  assert short.steps[-1] == 15
  assert len(short.adopted) > 12
  assert finished.missing == ()


@pytest.mark.parametrize("down_format", ["float32", "bfloat16"])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_after_a_run_all_have_the_same_bytes(tmp_path, down_format, alpha):
  # [N13] Checkpoint, every learner, the syncer.
  cfg = settings(
    quorum=1,
    num_syncer_steps=40,
    alpha=alpha,
    wire__down_format=down_format,
    wire__up_format="bfloat16",
    outer__learning_rate=0.7,
    outer__momentum=0.5,
  )
  with served_run(cfg, tmp_path / "run") as run:
    pair = [
      LoopLearner(run.address, "ada", paced(0.02, target=np.pi)),
      LoopLearner(run.address, "bob", paced(0.05, target=-np.e)),
    ]
    with learners(*pair):
      run.wait(30.0)
      for learner in pair:
        learner.end()
    tensors, _ = run.syncer.snapshot()
    num_merges = sum(f.version.n for f in run.status().fragments)

  final = {k: x for part in tensors.theta for k, x in part.items()}
  with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as saved:
    assert saved.latest() == num_merges
    params = fragments.flatten(saved.restore(saved.latest())["params"])
  assert num_merges >= 10
  assert max(np.abs(array).max() for array in final.values()) > 0.1
  digests = {
    digest_of(arrays)
    for arrays in (final, params, *(each.trainer.params for each in pair))
  }
  assert len(digests) == 1
