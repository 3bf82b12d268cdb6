"""A whole run goes on from a snapshot in a new directory, over gRPC."""

import copy
import json
import pathlib
import shutil

import pytest

from ddiloco_jax.launch import exits
from ddiloco_jax.protocol import events, tape
from ddiloco_jax.protocol.status import account_totals
from ddiloco_jax.report.ordeal import is_balanced
from tests.support import books
from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.served import wait_for

NAMES = "abc"
FEW = 40  # Merges.


class Kept:
  """Keeps a learner's part of each cut in memory, its trainer's state too."""

  def __init__(self, trainer):
    self.trainer = trainer
    self.parts: dict = {}

  def save(self, part, tell) -> None:
    params = {path: x.copy() for path, x in self.trainer.params.items()}
    self.parts[part.record.snapshot] = copy.deepcopy(part), params
    tell(None)


def begin(address, name, **more):
  """A learner, and where its parts are kept."""
  kept = Kept(paced(0.01, target=1 + ord(name) % 3))
  learner = LoopLearner(address, name, kept.trainer, save_cut=kept.save, **more)
  return learner, kept


def resume(address, name, kept, snapshot, **more):
  """A learner that goes on from its part."""
  part, params = kept.parts[snapshot]
  learner, fresh = begin(address, name, part=copy.deepcopy(part), **more)
  fresh.trainer.put(params)
  return learner


def num_merges(run):
  return sum(f.version.n for f in run.status().fragments)


def more_merges(run, num):
  wanted = num_merges(run) + num
  wait_for(lambda: num_merges(run) >= wanted)


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
  """(old run's directory, what the cut holds, learner -> its kept parts)."""
  old = tmp_path_factory.mktemp("cut") / "old"
  with served_run(shards(), old) as run:
    begun = {name: begin(run.address, name) for name in NAMES}
    with learners(*(learner for learner, _ in begun.values())):
      wait_for(lambda: run.status().num_training == len(NAMES))
      more_merges(run, FEW)
      over = run.syncer.take_snapshot()
      more_merges(run, FEW)  # Of these the restored run knows nothing.
  assert sorted(over.learners) == list(NAMES)
  return old, over, {name: kept for name, (_, kept) in begun.items()}


def shards(**sync):
  return settings(num_shards=4, max_learners=4, **sync)


def test_a_run_goes_on_from_a_snapshot_and_counts_nothing_twice(tmp_path, cut):
  old, over, kept = cut
  new = tmp_path / "new"

  with served_run(shards(), new, snapshot=old / "snapshots" / "latest") as run:
    start = run.syncer._state
    resumed = [
      resume(run.address, name, kept[name], over.snapshot) for name in NAMES
    ]
    with learners(*resumed):
      wait_for(lambda: run.status().num_training == len(NAMES))
      more_merges(run, FEW)
      run.request_stop()
      run.wait()
      for learner in resumed:
        learner.end()
    state = run.syncer._state

  assert tuple(f.version for f in start.fragments) == over.clock
  assert state.epoch == start.epoch == 2
  for name, learner in zip(NAMES, resumed):
    part, _ = kept[name].parts[over.snapshot]
    assert learner.steps[0] == part.record.step + 1
    was, now = start.learners[name], state.learners[name]
    assert now.incarnation == was.incarnation  # A reconnect, to the books.
    assert was.step <= part.record.step < now.step
    for p in range(2):
      reported = account_totals(state, name, p).reported
      assert reported.steps <= now.step  # Each step once, at the most.
  books.check_merged([until_the_cut(old), new / "tape.jsonl"], state)
  check_contiguous(new / "tape.jsonl", over.clock)


def until_the_cut(old: pathlib.Path) -> pathlib.Path:
  """The old run's tape without what the restored run knows nothing of."""
  path = old / "until_the_cut.jsonl"
  text = (old / "tape.jsonl").read_text()
  before, found, _ = text.partition('"type":"Captured"')
  assert found
  path.write_text(before[: before.rindex("\n") + 1])
  return path


def check_contiguous(path, clock):
  versions = [version.n for version in clock]
  for line in tape.Reader(path).lines():
    assert not line.fault, line.fault
    if isinstance(line.event, events.Merged):
      versions[line.event.fragment] += 1
      assert line.event.version.n == versions[line.event.fragment]
  assert all(now > then.n for now, then in zip(versions, clock))


def test_a_part_is_taken_once_and_the_next_process_starts_over(tmp_path, cut):
  old, over, kept = cut
  new = tmp_path / "new"

  with served_run(shards(), new, snapshot=old / "snapshots" / "latest") as run:
    first, other = (
      resume(run.address, name, kept[name], over.snapshot) for name in "ab"
    )
    with learners(first, other):
      wait_for(lambda: run.status().num_training == 2)
      more_merges(run, FEW)
      first.kill()
      again = resume(run.address, "a", kept["a"], over.snapshot, takeover=True)
      with learners(again):
        more_merges(run, FEW)
        run.request_stop()
        run.wait()
        again.end()
    state = run.syncer._state

  learner = state.learners["a"]
  assert learner.nonce == again.link.nonce
  assert first.link.nonce in learner.fenced_nonces
  books.check_merged([until_the_cut(old), new / "tape.jsonl"], state)


def test_a_learner_without_a_part_joins_as_a_newcomer(tmp_path, cut):
  old, over, kept = cut
  with served_run(
    shards(), tmp_path / "new", snapshot=old / "snapshots" / "1"
  ) as run:
    resumed = resume(run.address, "a", kept["a"], over.snapshot)
    newcomer, _ = begin(run.address, "b")
    with learners(resumed, newcomer):
      wait_for(lambda: run.status().num_training == 2)
      more_merges(run, FEW)
    state = run.syncer._state

  assert is_balanced(state)
  assert newcomer.steps[0] == 1
  assert state.learners["b"].nonce == newcomer.link.nonce
  assert resumed.steps[0] > 1


def test_a_run_goes_on_from_a_cut_that_names_who_was_away(tmp_path):
  old, new = tmp_path / "old", tmp_path / "new"
  with served_run(shards(), old) as run:
    a, kept = begin(run.address, "a")
    b, _ = begin(run.address, "b")
    with learners(a):
      with learners(b):
        wait_for(lambda: run.status().num_training == 2)
      wait_for(lambda: run.status().num_live == 1)
      over = run.syncer.take_snapshot()

  with served_run(shards(), new, snapshot=old / "snapshots" / "1") as run:
    resumed = resume(run.address, "a", kept, over.snapshot)
    with learners(resumed):
      more_merges(run, FEW)

  assert tuple(over.learners) == ("a",)
  assert [text.partition(":")[0] for text in over.skipped] == ["b"]


def test_a_restored_run_that_is_killed_goes_on_from_what_it_has(tmp_path, cut):
  old, over, kept = cut
  new, snapshot = tmp_path / "new", old / "snapshots" / "1"
  with served_run(shards(), new, snapshot=snapshot) as run:
    learner = resume(run.address, "a", kept["a"], over.snapshot)
    with learners(learner):
      more_merges(run, FEW)
  versions = [f.version.n for f in run.syncer._state.fragments]

  with served_run(
    shards(num_syncer_steps=0), new, restore=True, snapshot=snapshot
  ) as run:
    again = [f.version.n for f in run.syncer._state.fragments]
    origin = run.syncer.get_run()

  assert again == versions
  assert origin.origin_snapshot == over.snapshot


@pytest.mark.parametrize(
  ("path", "change", "said"),
  [
    ("snapshots/7", None, "is no whole snapshot"),
    ("snapshots/1", "no manifest", "written last"),
    ("snapshots/latest", "no manifest", "(none)"),
    ("snapshots/1", "manifest", "manifest.json is damaged"),
    ("snapshots/1", "another number", "is of snapshot 2"),
    ("snapshots/7", "another directory", "is of snapshot 1"),
    ("snapshots/1", "another clock", "the clock is"),
    ("snapshots/1", "another learner", "the learners, with the skipped"),
    ("snapshots/1", "a learner less", "the learners, with the skipped"),
    ("snapshots/1", "syncer", "is damaged"),
    ("snapshots/1", "no seal", "it has no seal.json"),
  ],
)
def test_a_damaged_snapshot_is_refused_by_name(
  tmp_path, cut, path, change, said
):
  old = tmp_path / "damaged"
  shutil.copytree(cut[0], old)
  damage(old / "snapshots" / "1", change)

  with (
    pytest.raises(exits.BadUsage) as refused,
    served_run(shards(), tmp_path / "new", snapshot=old / path),
  ):
    pass

  assert said in str(refused.value)
  assert not (tmp_path / "new" / "tape.jsonl").exists()


def damage(directory: pathlib.Path, change):
  match change:
    case "no manifest":
      (directory / "manifest.json").unlink()
    case "manifest":
      (directory / "manifest.json").write_text('{"snapshot": 1')
    case "another directory":
      shutil.copytree(directory, directory.with_name("7"))
    case "another number":
      edit(directory, snapshot=2)
    case "another clock":
      edit(directory, clock=[[1, 1], [1, 1]])
    case "another learner":
      edit(directory, learners=["a", "b", "eve"])
    case "a learner less":
      edit(directory, learners=["a", "b"])
    case "no seal":
      (directory / "syncer" / "seal.json").unlink()
    case "syncer":
      biggest = max(
        (p for p in (directory / "syncer").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
      )
      data = bytearray(biggest.read_bytes())
      data[len(data) // 2] ^= 1
      biggest.write_bytes(data)


def edit(directory: pathlib.Path, **values):
  path = directory / "manifest.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
  ("settings", "told"),
  [
    ({"cycle_steps": 8}, r"sync\.cycle_steps is 8"),
    ({"num_syncer_steps": 1}, r"t has reached 1\. Raise the limit"),
  ],
)
def test_settings_that_do_not_fit_the_snapshot_are_refused(
  tmp_path, cut, settings, told
):
  old, _, _ = cut

  with (
    pytest.raises(exits.BadUsage, match=told),
    served_run(
      shards(**settings),
      tmp_path / "new",
      snapshot=old / "snapshots" / "latest",
    ),
  ):
    pass


def test_the_old_runs_own_directory_is_no_place_to_restore_into(cut):
  old, _, _ = cut

  with (
    pytest.raises(exits.BadUsage, match="did not begin from a snapshot"),
    served_run(shards(), old, restore=True, snapshot=old / "snapshots" / "1"),
  ):
    pass
