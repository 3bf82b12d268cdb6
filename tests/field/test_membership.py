"""Who takes part: learners that die, are slow, come late or are misconfigured.

The names in brackets are those of public fault reports: what users of such
systems ran into, as a kind.
"""

import logging
import statistics
import threading
import time
import tracemalloc

import numpy as np
import pytest

from ddiloco_jax import config
from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.wire import codec
from ddiloco_jax.wire.status import ServiceError
from tests.support.numpy_learner import NumpyLearner
from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.receipts import read
from tests.support.served import Served, wait_for

STEP_S = 0.03


def test_the_next_run_reaches_quorum_with_new_learners_only(tmp_path):
  # [M1] Both learners vanish; two others take the run over.
  cfg = settings(quorum=2, lease_s=1.5)
  with served_run(cfg, tmp_path / "run") as run:
    old = [
      NumpyLearner(LoopClient(run, name), name) for name in ("old-0", "old-1")
    ]
    for learner in old:
      learner.start()
    wait_for(lambda: all(learner.num_included() for learner in old))
    for learner in old:
      learner.kill()
    wait_for(lambda: run.status().num_live == 0, 10.0)
    versions = [f.version.n for f in run.status().fragments]

    new = [LoopLearner(run.address, f"new-{i}", paced(STEP_S)) for i in "01"]
    with learners(*new):
      wait_for(
        lambda: all(
          f.version.n >= n + 2 for f, n in zip(run.status().fragments, versions)
        )
      )

  for fragment, n, inputs in read(tmp_path / "run" / "tape.jsonl").merges:
    expected = "old" if n <= versions[fragment] else "new"
    names = {who.learner for who, _, _ in inputs}
    assert {name.partition("-")[0] for name in names} <= {expected}
    assert len(names) == 2 or n > versions[fragment] + 2


def test_one_killed_in_the_middle_of_a_push_leaves_no_buffer_and_no_gap():
  # [M3] One of four, half of its fragment of 32 MiB sent.
  theta = {
    "big": np.zeros((8, 1 << 20), np.float32),
    "small": np.zeros(3, np.float32),
  }
  rules = Rules(num_fragments=2, cycle_steps=4, quorum=1, lease_s=3.0)
  run = Served(theta, rules, learning_rate=0.7)
  try:
    dying = Dying(run.client("victim"))
    others = [
      NumpyLearner(run.client(name), name, step_s=0.1)
      for name in ("l0", "l1", "l2")
    ]
    victim = NumpyLearner(dying, "victim", step_s=0.1)
    tracemalloc.start()
    try:
      for learner in (victim, *others):
        learner.start()
      assert dying.half_sent.wait(20.0)
      assert _buffers(run) >= 1
      victim.kill()
      dying.client.close()
      dying.may_go_on.set()
      wait_for(lambda: run.all_of(events.PushBroken))
      wait_for(lambda: _buffers(run) == 0)
    finally:
      tracemalloc.stop()
    merges = len(run.all_of(events.Merge))

    def merged_since():
      return {
        item.key.learner
        for merge in run.all_of(events.Merge)[merges:]
        for item in merge.inputs
      }

    wait_for(lambda: merged_since() >= {"l0", "l1", "l2"}, 60.0)
  finally:
    for learner in (victim, *others):
      learner.kill()
    run.close()

  assert merged_since() == {"l0", "l1", "l2"}


def test_a_slow_learner_takes_part_and_weighs_what_it_did(tmp_path):
  # [M6] K = 1 with grace; one learner is four times slower. The grace window
  # is cut from two steps: they are long against the way to adoption here.
  cfg = settings(
    num_fragments=2, cycle_steps=12, num_syncer_steps=120, quorum=1
  )
  with served_run(cfg, tmp_path / "run") as run:
    fast = LoopLearner(run.address, "fast", paced(0.1, lr=0.01))
    slow = LoopLearner(run.address, "slow", paced(0.4, lr=0.01))
    with learners(fast, slow):
      finished = run.wait(60.0)
      fast.end()
      slow.end()

  merges = read(tmp_path / "run" / "tape.jsonl").merges
  settled = [inputs for _, n, inputs in merges if n > 1]
  ratios = []
  for inputs in settled:
    weights = {who.learner: weight for who, _, weight in inputs}
    if len(weights) == 2:
      ratios.append(weights["slow"] / weights["fast"])
  assert finished.exit_code == 0
  assert len(settled) >= 16
  assert statistics.mean(len(inputs) for inputs in settled) > 1.8
  # Equal tokens a step: the weight is proportional to the steps.
  assert statistics.median(ratios) == pytest.approx(1 / 4, abs=0.08)
  digests = {}
  for p, version, _, _, digest in fast.adopted + slow.adopted:
    assert digests.setdefault((p, version), digest) == digest
  both = {a[:2] for a in fast.adopted} & {a[:2] for a in slow.adopted}
  assert len(both) >= 8


def test_status_and_log_say_within_seconds_what_is_missing(tmp_path, caplog):
  # [M2] quorum 3, two learners.
  caplog.set_level(logging.INFO)
  cfg = settings(quorum=3, lease_s=2.0, quorum_timeout_s=8.0)
  with served_run(cfg, tmp_path / "run") as run:
    pair = [LoopLearner(run.address, n, paced(STEP_S)) for n in ("ada", "bob")]
    with learners(*pair):
      wait_for(lambda: run.status().num_training == 2)
      said = run.status().waiting_for
      wait_for(lambda: said in caplog.text, 5.0)
      finished = run.wait(20.0)
      for learner in pair:
        learner.end()

  for word in ("1 more learner", "quorum 3", "ada", "bob"):
    assert word in said
  assert finished.exit_code == 4
  assert "quorum_timeout" in finished.reason


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_learner_may_start_many_leases_after_the_first(tmp_path, quorum):
  # [M8] Nothing dies in the meantime, whether the first may go on or waits.
  cfg = settings(
    quorum=quorum, lease_s=1.2, quorum_timeout_s=30.0, num_syncer_steps=0
  )
  with served_run(cfg, tmp_path / "run") as run:
    first = LoopLearner(run.address, "first", paced(STEP_S))
    late = LoopLearner(run.address, "late", paced(STEP_S))
    with learners(first):
      time.sleep(4 * cfg.sync.lease_s)
      assert first.is_alive()
      assert run.status().num_live == 1
      assert run.status().learners[0].training
      with learners(late):
        wait_for(
          lambda: (
            len(run.status().fragments) == 2
            and all(f.num_contributors == 2 for f in run.status().fragments)
          )
        )
        run.request_stop()
        assert run.wait().exit_code == 0
        assert first.end() == late.end()
        assert not run.status().counters.get("lease_expired")


def test_a_learners_own_timeouts_may_not_contradict_the_syncers(tmp_path):
  # [M8] The inequality is printed with both values.
  own = config.default()
  own.run.max_solo_s = 20.0
  mine = config.freeze(own)
  shared = config.shared_json(settings(lease_s=40.0))

  with pytest.raises(ValueError, match=r"lease_s < run\.max_solo_s") as caught:
    config.with_shared(mine, shared)

  assert "40.0" in str(caught.value)
  assert "20.0" in str(caught.value)


class LoopClient:
  """A client of a served run that closes with it; what NumpyLearner joins."""

  def __init__(self, run, name):
    from ddiloco_jax.learner.client import Client

    self._client = Client(run.address, learner=name)

  def __getattr__(self, name):
    return getattr(self._client, name)


class Dying:
  """Sends half of the first big fragment, and no more."""

  def __init__(self, client):
    self.client = client
    self.half_sent = threading.Event()
    self.may_go_on = threading.Event()

  def __getattr__(self, name):
    return getattr(self.client, name)

  def push(self, header, chunks):
    if header.num_bytes < 1 << 20:
      raise ServiceError("INVALID_ARGUMENT", "a small one is not of interest")
    return self.client.push(header, self._half(list(chunks)))

  def _half(self, chunks):
    yield from chunks[: len(chunks) // 2]
    self.half_sent.set()
    self.may_go_on.wait(30.0)
    yield from chunks[len(chunks) // 2 :]


def _buffers(run: Served) -> int:
  """Receive buffers of a whole big fragment that are held now."""
  num_bytes = codec.num_bytes(run.layout.fragment(0), "float32")
  traces = tracemalloc.take_snapshot().traces
  return sum(
    trace.size >= num_bytes
    and any("inbox.py" in frame.filename for frame in trace.traceback)
    for trace in traces
  )
