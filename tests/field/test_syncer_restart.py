"""A syncer that stops or dies in the middle, and goes on with --restore."""

import json
import signal

import numpy as np
import pytest

from ddiloco_jax.protocol import events, tape
from ddiloco_jax.protocol.status import account_totals
from tests.support.over_grpc import (
  SHAPES,
  THETA,
  LoopLearner,
  digest_of,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.processes import (
  SYNCER,
  address_of,
  ending,
  module,
  small_run,
)
from tests.support.served import wait_for


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
  # Stopped in order, as by SIGTERM; restored; new processes of the same ids.
  cfg = settings(quorum=2)
  with served_run(cfg, tmp_path / "run") as run:
    with learners(*pair(run.address)) as first:
      wait_for(lambda: min(versions(run)) >= 3)
      run.request_stop("SIGTERM was received")
      assert run.wait(30.0).exit_code == 0
      digest = digest_of(first[0].trainer.params)
    stopped = versions(run)

  with served_run(cfg, tmp_path / "run", restore=True) as run:
    assert versions(run) == stopped
    assert run.status().epoch == 2
    assert digest_of(flat(run)) == digest
    spec = run.syncer.get_run()
    with learners(*pair(run.address)) as second:
      wait_for(lambda: min(versions(run)) >= max(stopped) + 3)
      run.request_stop()
      assert run.wait(30.0).exit_code == 0
    ended = versions(run)
    assert digest_of(second[0].trainer.params) == digest_of(flat(run))
    check_books(run.syncer.snapshot()[1])

  assert spec.epoch == 2
  merged = merges(tmp_path / "run" / "tape.1.jsonl")
  merged += merges(tmp_path / "run" / "tape.jsonl")
  for p in range(2):
    numbers = [m.version.n for m in merged if m.fragment == p]
    assert numbers == list(range(1, ended[p] + 1))
  replayed = tape.replay(tmp_path / "run" / "tape.jsonl")
  assert replayed.faults == ()


def test_learners_that_stay_alive_join_a_killed_and_restored_syncer(tmp_path):
  # SIGKILL: no goodbye to anyone; whatever they were told of is there again.
  run_dir = tmp_path / "run"
  flags = small_run(
    tmp_path,
    sync__cycle_steps=4,
    run__checkpoint_every_s=1.5,
    wire__up_format="float32",
  )
  with ending() as start:
    first = start(
      module(SYNCER, "--address=127.0.0.1:0", *flags), tmp_path / "1.log"
    )
    address = address_of(run_dir, first)
    two = pair(address)
    with learners(*two):
      wait_for(lambda: all(len(each.adopted) >= 12 for each in two), 60.0)
      wait_for(lambda: saved_versions(run_dir) >= 4, 60.0)
      first.signal(signal.SIGKILL)
      first.wait()
      steps = [len(each.steps) for each in two]
      second = start(
        module(SYNCER, f"--address={address}", "--restore", *flags),
        tmp_path / "2.log",
      )
      address_of(run_dir, second)
      wait_for(lambda: all(epoch(each) == 2 for each in two), 60.0)
      count = [len(each.adopted) for each in two]
      # They trained while nobody was there, and merge again.
      assert all(len(a.steps) > n + 5 for a, n in zip(two, steps))
      wait_for(
        lambda: all(len(a.adopted) >= n + 8 for a, n in zip(two, count)), 60.0
      )
      second.signal(signal.SIGTERM)
      code = second.wait(30.0)
      for each in two:
        each.end()

  assert code == 0, second.said()
  assert digest_of(two[0].trainer.params) == digest_of(two[1].trainer.params)
  header = json.loads((run_dir / "tape.jsonl").read_text().splitlines()[0])
  assert header["epoch"] == 2
  replayed = tape.replay(run_dir / "tape.jsonl")
  assert (replayed.faults, replayed.closed) == ((), True)
  start_n = replayed.state.starts[-1]
  for p in range(2):
    old = [
      m.version for m in merges(run_dir / "tape.1.jsonl") if m.fragment == p
    ]
    new = [m.version for m in merges(run_dir / "tape.jsonl") if m.fragment == p]
    assert [v.n for v in old] == list(range(1, len(old) + 1))
    assert start_n[p] <= len(old)
    told = [
      v.n for a in two for q, v, *_ in a.adopted if (q, v.epoch) == (p, 1)
    ]
    assert max(told) <= start_n[p]
    first_n = start_n[p] + 1
    assert [v.n for v in new] == list(range(first_n, first_n + len(new)))
    assert {v.epoch for v in new} == {2}
    assert len(new) >= 3
  both = [
    len({i.key.learner for i in m.inputs})
    for m in merges(run_dir / "tape.jsonl")
  ]
  assert both.count(2) >= 4
  assert tape.replay(run_dir / "tape.1.jsonl").faults == ()
  check_books(replayed.state)


@pytest.mark.parametrize(
  ("outer_name", "added"),
  [
    ("sgd", {"c": np.zeros((), np.float32)}),
    ("adam", {}),
  ],
)
def test_arrays_without_dimensions_outlive_a_kill(tmp_path, outer_name, added):
  # A leaf of the model; the count of steps of the outer optimizer.
  theta = THETA | added
  shapes = {path: array.shape for path, array in theta.items()}
  flags = small_run(
    tmp_path,
    theta,
    sync__cycle_steps=4,
    outer__name=outer_name,
    wire__up_format="float32",
  )
  with ending() as start:
    first = start(
      module(SYNCER, "--address=127.0.0.1:0", *flags), tmp_path / "1.log"
    )
    address = address_of(tmp_path / "run", first)
    two = pair(address, shapes)
    with learners(*two):
      wait_for(lambda: all(len(each.adopted) >= 8 for each in two), 60.0)
      first.signal(signal.SIGKILL)
      first.wait()
      second = start(
        module(SYNCER, f"--address={address}", "--restore", *flags),
        tmp_path / "2.log",
      )
      address_of(tmp_path / "run", second)
      wait_for(lambda: all(epoch(each) == 2 for each in two), 60.0)
      count = [len(each.adopted) for each in two]
      wait_for(
        lambda: all(len(a.adopted) >= n + 4 for a, n in zip(two, count)), 60.0
      )
      second.signal(signal.SIGTERM)
      assert second.wait(30.0) == 0, second.said()
      for each in two:
        each.end()

  assert digest_of(two[0].trainer.params) == digest_of(two[1].trainer.params)
  replayed = tape.replay(tmp_path / "run" / "tape.jsonl")
  assert (replayed.faults, replayed.closed) == ((), True)
  assert min(replayed.state.starts[-1]) >= 2
  check_books(replayed.state)


@pytest.mark.parametrize("change", ["fragments", "model", "shards"])
def test_a_restored_run_keeps_its_split_its_model_and_its_shards(
  tmp_path, change
):
  with served_run(settings(), tmp_path / "run"):
    pass
  cfg, theta = settings(), dict(THETA)
  if change == "fragments":
    cfg = settings(num_fragments=1)
  elif change == "shards":
    cfg = settings(num_shards=settings().sync.num_shards - 1, max_learners=2)
  else:
    theta["b"] = np.zeros((7, 5), np.float32)

  with (
    pytest.raises(ValueError, match="may not change"),
    served_run(cfg, tmp_path / "run", restore=True, theta=theta),
  ):
    pass

  with served_run(settings(), tmp_path / "run", restore=True) as run:
    assert run.status().epoch >= 2


def pair(address, shapes=SHAPES):
  return [
    LoopLearner(address, name, paced(0.03, shapes=shapes))
    for name in ("ada", "bob")
  ]


def versions(run):
  return [f.version.n for f in run.status().fragments]


def flat(run):
  tensors, _ = run.syncer.snapshot()
  return {k: x for part in tensors.theta for k, x in part.items()}


def epoch(learner):
  return learner.link.welcome.epoch if learner.adopted else 0


def saved_versions(run_dir):
  steps = [
    int(path.name)
    for path in (run_dir / "checkpoints").iterdir()
    if path.name.isdigit()
  ]
  return max(steps, default=0)


def merges(path):
  return [
    effect
    for line in tape.Reader(path).lines()
    for effect in line.effects
    if isinstance(effect, events.Merge)
  ]


def check_books(state):
  """reported = merged + discarded + pending, for each learner and fragment."""
  assert len(state.learners) == 2
  for name in state.learners:
    for p in range(2):
      totals = account_totals(state, name, p)
      rest = [totals.merged, totals.pending, *(c for _, c in totals.discarded)]
      assert totals.reported.steps == sum(c.steps for c in rest)
      assert totals.reported.tokens == sum(c.tokens for c in rest)
      assert totals.merged.tokens > 0
