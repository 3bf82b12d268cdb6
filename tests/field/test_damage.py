"""A run directory that was damaged: nothing published is lost in silence.

Each start is refused and touches nothing, goes on with everything, or goes on
without what is lost because somebody said so.
"""

import logging
import os
import pathlib
import shutil

import pytest

from ddiloco_jax.launch import syncing
from ddiloco_jax.protocol import tape
from ddiloco_jax.syncer import records
from ddiloco_jax.syncer.errors import InUse
from tests.support.crashing import Crash
from tests.support.numpy_learner import NumpyLearner
from tests.support.over_grpc import THETA, settings
from tests.support.served import wait_for

DURABLE = {"run__checkpoint_every_s": 1000.0, "run__max_to_keep": 2}


def live(run_dir, merges, saves=(), **changes):
  """A life of a run in `run_dir`: a copy of it is what a kill leaves."""
  cfg = settings(quorum=1, **DURABLE, **changes)
  restore = (run_dir / "checkpoints").exists()
  run = syncing.SyncerRun(cfg, str(run_dir), restore=restore, theta=THETA)
  learner = NumpyLearner(run.syncer, "ada")
  try:
    learner.start()
    start = num_merges(run)
    for at in (*saves, merges):
      wait_for(lambda at=at: num_merges(run) >= start + at)
      if at in saves:
        run._save()
        run.store.wait()
    learner.kill()
    wait_for(lambda: not run.syncer.state.rounds)
    killed = run_dir.with_name("killed")
    shutil.copytree(run_dir, killed)
  finally:
    learner.kill()
    run.close()
  shutil.rmtree(run_dir)
  killed.rename(run_dir)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  """Three epochs; two checkpoints of the last one, and commits since."""
  run_dir = tmp_path_factory.mktemp("killed") / "run"
  live(run_dir, 3)
  live(run_dir, 3)
  live(run_dir, 18, saves=(6, 12))
  return run_dir


@pytest.fixture
def run_dir(killed, tmp_path):
  return pathlib.Path(shutil.copytree(killed, tmp_path / "run"))


def num_merges(run):
  return sum(f.version.n for f in run.syncer.state.fragments)


def told(run_dir):
  """The merges on the tapes, and so published."""
  *_, line = tape.Reader(run_dir / "tape.jsonl").lines()
  return sum(f.version.n for f in line.state.fragments)


def files_of(run_dir):
  return {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}


def start(run_dir, restore=True, **changes):
  """Merges and epoch of a start, which is ended at once."""
  cfg = settings(quorum=1, **DURABLE, **changes)
  run = syncing.SyncerRun(cfg, str(run_dir), restore=restore, theta=THETA)
  try:
    return num_merges(run), run.syncer.state.epoch
  finally:
    run.close()


def refused(
  run_dir, match, error: type[Exception] = ValueError, restore=True, **changes
):
  before = files_of(run_dir)
  with pytest.raises(error, match=match):
    start(run_dir, restore, **changes)
  assert files_of(run_dir) == before


def journal(run_dir):
  """The files of the journal, the newest last."""

  def name(path):
    return [int(number) for number in path.stem.split("-")]

  return sorted((run_dir / "journal").glob("*.log"), key=name)


def checkpoints(run_dir):
  return sorted((run_dir / "checkpoints").iterdir(), key=lambda p: int(p.name))


def spans(path):
  """Where each record of a file begins."""
  with path.open("rb") as file:
    found = [*records.read(file)]
  return [0, *(x.end for x in found[:-1] if isinstance(x, records.Record))]


def num_merges_before(path):
  with path.open("rb") as file:
    first = next(records.read(file))
  assert isinstance(first, records.Record)
  return first.head["num_merges"]


def flip(path, at):
  with path.open("r+b") as file:
    file.seek(at)
    byte = file.read(1)
    file.seek(at)
    file.write(bytes([byte[0] ^ 0xFF]))


def test_what_is_whole_is_restored_whole(run_dir):
  told_of = told(run_dir)

  assert start(run_dir) == (told_of, 4)


def test_a_file_in_the_journal_that_is_not_ours_changes_nothing(run_dir):
  told_of = told(run_dir)
  for name in (f"{'9' * 200}-0", "1000000-0", "4-x", "backup"):
    (run_dir / "journal" / f"{name}.log").write_text("not ours")

  assert start(run_dir) == (told_of, 4)


# --- checkpoints ------------------------------------------------------------------


def test_a_syncer_that_dies_again_and_again_saves_no_less_often(tmp_path):
  # No life is as long as run.checkpoint_every_s; the journal would only grow.
  cfg = settings(quorum=1, run__checkpoint_every_s=1.5)
  for life in range(6):
    run = syncing.SyncerRun(
      cfg, str(tmp_path / "run"), restore=life > 0, theta=THETA
    )
    newest, until = run.store.checkpoints.latest(), run.syncer.state.now + 0.5
    learner = NumpyLearner(run.syncer, "ada")

    def until_it_dies(run=run, until=until):
      if run.syncer.state.now > until:
        raise Crash  # With no goodbye, and no last save.

    try:
      learner.start()
      with pytest.raises(Crash):
        run.run(until_it_dies)
    finally:
      learner.kill()
      run.close()

  assert newest


@pytest.mark.parametrize("restore", [True, False])
@pytest.mark.parametrize("rest", ["journal", "tapes"])
def test_merges_without_a_checkpoint_are_no_fresh_run(run_dir, restore, rest):
  shutil.rmtree(run_dir / "checkpoints")
  if rest == "tapes":
    shutil.rmtree(run_dir / "journal")
  else:
    for path in run_dir.glob("tape*"):
      path.unlink()

  refused(run_dir, "no complete checkpoint", InUse, restore=restore)


def cut_in_half(checkpoint):
  paths = [path for path in checkpoint.rglob("*") if path.is_file()]
  largest = max(paths, key=lambda path: path.stat().st_size)
  os.truncate(largest, largest.stat().st_size // 2)


def test_a_damaged_newest_checkpoint_is_replaced_by_an_older_one(
  run_dir, caplog
):
  told_of = told(run_dir)
  *_, newest = checkpoints(run_dir)
  cut_in_half(newest)

  with caplog.at_level(logging.WARNING):
    assert start(run_dir) == (told_of, 4)

  assert f"{newest} is damaged" in caplog.text
  assert [path.name for path in checkpoints(run_dir)].count(newest.name) == 0
  assert (run_dir / "checkpoints.damaged").exists()


def test_only_damaged_checkpoints_are_named(run_dir):
  for checkpoint in checkpoints(run_dir):
    cut_in_half(checkpoint)

  with pytest.raises(ValueError, match="no checkpoint can be read") as caught:
    start(run_dir)

  for checkpoint in checkpoints(run_dir):
    assert str(checkpoint) in str(caught.value)


# --- the journal ------------------------------------------------------------------


def test_damage_in_what_a_checkpoint_covers_is_not_even_read(run_dir, caplog):
  told_of, (*_, older, _) = told(run_dir), journal(run_dir)
  flip(older, spans(older)[3] + 40)

  with caplog.at_level(logging.WARNING):
    assert start(run_dir) == (told_of, 4)

  assert "damaged" not in caplog.text


def test_lives_too_short_for_a_save_leave_no_journal_behind(run_dir):
  for _ in range(3):
    live(run_dir, 2)

  oldest = int(checkpoints(run_dir)[0].name)
  starts = [num_merges_before(file) for file in journal(run_dir)]
  assert [start <= oldest for start in starts].count(True) == 1, starts


def damage_head(newest):
  flip(newest, 20)


def damage_middle(newest):
  flip(newest, spans(newest)[3] + 40)


def damage_length(newest):
  flip(newest, spans(newest)[3] + 6)


def damage_last(newest):
  flip(newest, spans(newest)[-1] + 40)


def empty(newest):
  os.truncate(newest, 0)


def cut_record(newest):
  os.truncate(newest, spans(newest)[3] + 40)


@pytest.mark.parametrize(
  "damage",
  [
    damage_head,
    damage_middle,
    damage_length,
    damage_last,
    empty,
    cut_record,
    pathlib.Path.unlink,
  ],
)
def test_published_versions_are_not_lost_in_silence(run_dir, damage, caplog):
  told_of, (*_, newest) = told(run_dir), journal(run_dir)
  damage(newest)

  *_, before = [path for path in journal(run_dir) if path != newest]
  where = {
    damage_length: f"byte .* of {newest}, where a record is cut short",
    cut_record: f"byte .* of {newest}, where a record is cut short",
    empty: f"{newest} is empty or cut short",
    pathlib.Path.unlink: f"it ends at byte .* of {before}",
  }.get(damage, f"{newest} is damaged at byte")
  refused(run_dir, f"of fragment .*{where}.*accept_loss=True")
  with caplog.at_level(logging.WARNING):
    merges, epoch = start(run_dir, run__accept_loss=True)

  assert int(checkpoints(run_dir)[0].name) <= merges < told_of
  assert epoch == 4
  assert "going on without" in caplog.text
  assert start(run_dir) == (merges, 5)  # Accepted once and for all.


def test_a_torn_tail_of_what_was_never_published_is_left_out(run_dir):
  told_of, (*_, newest) = told(run_dir), journal(run_dir)
  last = newest.read_bytes()[spans(newest)[-1] :]
  with newest.open("ab") as file:
    file.write(last[: len(last) // 2])

  assert start(run_dir) == (told_of, 4)


def test_no_tape_is_written_over_or_gone_on_with(run_dir):
  # As if epoch 3 had never been: its number is known from its tape alone.
  for path in journal(run_dir):
    if path.name.startswith("3-"):
      path.unlink()
  tapes = {p.name: p.read_bytes() for p in run_dir.glob("tape*.jsonl")}

  _, epoch = start(run_dir, run__accept_loss=True)

  assert epoch == 4
  tapes["tape.3.jsonl"] = tapes.pop("tape.jsonl")
  for name, data in tapes.items():
    assert (run_dir / name).read_bytes() == data


def test_a_tape_whose_place_is_taken_refuses_the_start(run_dir):
  shutil.copy(run_dir / "tape.jsonl", run_dir / "tape.3.jsonl")

  refused(run_dir, "no tape is ever written over", InUse)


def test_a_journal_of_another_run_is_refused(run_dir, tmp_path):
  live(tmp_path / "other", 3)
  shutil.rmtree(run_dir / "journal")
  shutil.copytree(tmp_path / "other" / "journal", run_dir / "journal")

  refused(run_dir, "is of the run .* one run are not put on top of another")


def test_a_run_whose_journal_is_gone_goes_on_in_a_later_epoch(tmp_path):
  cfg = settings(quorum=1, **DURABLE)
  run = syncing.SyncerRun(cfg, str(tmp_path / "run"), theta=THETA)
  run.close()
  shutil.rmtree(tmp_path / "run" / "journal")

  assert start(tmp_path / "run") == (0, 2)
  for path in (tmp_path / "run").glob("tape*"):
    path.unlink()
  shutil.rmtree(tmp_path / "run" / "journal")
  assert start(tmp_path / "run") == (0, 2)  # All that the checkpoint knows.


def test_without_durable_commits_a_rollback_is_normal(tmp_path, caplog):
  live(tmp_path / "run", 8, saves=(4,), run__durability="snapshot")
  saved = int(checkpoints(tmp_path / "run")[-1].name)

  with caplog.at_level(logging.WARNING):
    merges, epoch = start(tmp_path / "run", run__durability="snapshot")

  assert (merges, epoch) == (saved, 2)
  assert "would be lost, as its settings have it" in caplog.text
