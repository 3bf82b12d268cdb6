"""C3: the directory of a run is full; it says so, and keeps what it had."""

import errno
import json
import shutil

import pytest

from ddiloco_jax.launch import exits, syncing
from ddiloco_jax.syncer.files import OsFiles
from tests.support.in_process import syncer_run
from tests.support.numpy_learner import NumpyLearner
from tests.support.over_grpc import THETA, settings
from tests.support.served import wait_for


class Disk(OsFiles):
  """Has no room while it is full: then half of what is written gets there."""

  is_full = False

  def write(self, fd, data):
    if self.is_full:
      super().write(fd, data[: len(data) // 2])
      raise OSError(errno.ENOSPC, "No space left on device")
    super().write(fd, data)


def test_a_run_that_cannot_begin_for_lack_of_room_says_so(tmp_path):
  disk = Disk()
  disk.is_full = True

  with (
    pytest.raises(exits.WriteFailed, match=r"No space left.*Make room"),
    syncer_run(settings(), tmp_path / "run", theta=THETA, files=disk),
  ):
    pass

  disk.is_full = False
  with syncer_run(settings(), tmp_path / "run", theta=THETA, files=disk) as run:
    assert versions(run) == [0, 0]


def test_a_commit_that_cannot_be_written_stops_the_run(tmp_path):
  disk = Disk()
  with syncer_run(settings(), tmp_path / "run", theta=THETA, files=disk) as run:
    learner = NumpyLearner(run.syncer, "ada")
    learner.start()
    wait_for(lambda: min(versions(run)) >= 2)
    disk.is_full = True
    with pytest.raises(exits.WriteFailed, match="No space left"):
      run.run(lambda: None)
    disk.is_full = False
    told = versions(run)
    served = [run.syncer._merger.get(p, 0, True).version.n for p in range(2)]
    alarms = run.syncer.status().alarms
    learner.kill()

  assert served == told  # It was not published, and cannot be fetched.
  assert "No space left" in alarms[-1]
  assert "No space left" in write_failures(tmp_path / "run")[0]
  with syncer_run(
    settings(), tmp_path / "run", theta=THETA, restore=True
  ) as run:
    assert versions(run) == told


def test_a_run_may_go_on_without_commits_until_there_is_room(tmp_path):
  disk = Disk()
  cfg = settings(run__on_write_error="continue")
  with syncer_run(cfg, tmp_path / "run", theta=THETA, files=disk) as run:
    learner = NumpyLearner(run.syncer, "ada")
    learner.start()
    wait_for(lambda: min(versions(run)) >= 1)
    disk.is_full = True
    before = versions(run)
    wait_for(lambda: min(versions(run)) >= max(before) + 2)
    shutil.copytree(tmp_path / "run", tmp_path / "meanwhile")
    disk.is_full = False
    before = versions(run)
    wait_for(lambda: min(versions(run)) >= max(before) + 2)
    told = versions(run)
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    learner.kill()

  assert write_failures(tmp_path / "run")
  with syncer_run(cfg, tmp_path / "killed", theta=THETA, restore=True) as run:
    assert all(a >= b for a, b in zip(versions(run), told))
  with syncer_run(
    cfg, tmp_path / "meanwhile", theta=THETA, restore=True
  ) as run:
    assert all(a < b for a, b in zip(versions(run), told))


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_checkpoint_that_cannot_be_written(tmp_path, policy):
  cfg = settings(run__on_write_error=policy, run__checkpoint_every_s=0.01)
  with syncer_run(cfg, tmp_path / "run", theta=THETA) as run:
    learner = NumpyLearner(run.syncer, "ada")
    learner.start()
    wait_for(lambda: min(versions(run)) >= 1)
    aside = tmp_path / "aside"
    (run.store.path / "checkpoints").rename(aside)
    (run.store.path / "checkpoints").write_text("in the way")

    def make_room():
      if aside.exists():
        (run.store.path / "checkpoints").unlink()
        aside.rename(run.store.path / "checkpoints")
      return "enough"

    if policy == "stop":
      with pytest.raises(exits.WriteFailed, match="could not"):
        run.run(lambda: None)
      make_room()
    else:
      finished = run.run(
        lambda: make_room() if write_failures(tmp_path / "run") else None
      )
      assert finished.exit_code == 0
    assert "could not" in write_failures(tmp_path / "run")[0]
    learner.kill()
    told = versions(run)

  with syncer_run(cfg, tmp_path / "run", theta=THETA, restore=True) as run:
    # A merge that was under way is durable, too.
    assert all(a >= b for a, b in zip(versions(run), told))


def versions(run: syncing.SyncerRun) -> list[int]:
  return [f.version.n for f in run.syncer.status().fragments]


def write_failures(run_dir) -> list[str]:
  lines = (run_dir / "metrics.jsonl").read_text().splitlines()
  records = [json.loads(line) for line in lines]
  return [r["reason"] for r in records if r.get("what") == "write_failed"]
