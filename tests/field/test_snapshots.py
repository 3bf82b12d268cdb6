"""A consistent snapshot of a run that trains meanwhile, over gRPC."""

import errno
import json
import pathlib
import shutil
import threading
from typing import Any

import numpy as np
import pytest

from ddiloco_jax.algorithm import fragments
from ddiloco_jax.cli import admin
from ddiloco_jax.launch import exits
from ddiloco_jax.learner.client import Client
from ddiloco_jax.protocol import tape
from ddiloco_jax.syncer import manifest
from ddiloco_jax.syncer.files import OsFiles
from ddiloco_jax.training.checkpoint import Checkpoints
from ddiloco_jax.wire import port
from ddiloco_jax.wire.status import ServiceError
from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
  strict_lines,
)
from tests.support.served import wait_for


class Part:
  """Keeps a learner's part of a cut in memory."""

  def __init__(self):
    self.parts: dict[int, Any] = {}

  def save(self, part, tell) -> None:
    self.parts[part.record.snapshot] = part
    tell(None)


def test_a_snapshot_is_one_cut_while_the_run_goes_on(
  tmp_path: pathlib.Path, capsys
):
  parts = Part(), Part()
  with served_run(settings(), tmp_path) as run:
    a, b = (
      LoopLearner(run.address, name, paced(0.01), save_cut=part.save)
      for name, part in zip("ab", parts)
    )
    with learners(a, b):
      wait_for(lambda: run.status().num_training == 2)
      for number in (1, 2, 3):
        assert admin.main([run.address, "snapshot", "--json"]) == exits.OK
        reply = json.loads(capsys.readouterr().out)
        manifest = json.loads(
          (tmp_path / "snapshots" / str(number) / "manifest.json").read_text()
        )

        assert reply["snapshot"] == number
        assert sorted(reply["learners"]) == ["a", "b"]
        assert not reply["skipped"]
        assert manifest["path"] == reply["path"]
        clock = [tuple(v) for v in manifest["clock"]]
        for part in parts:
          assert list(part.parts[number].versions) == clock
        merges = sum(n for _, n in clock)
        wait_for(
          lambda m=merges: sum(f.version.n for f in run.status().fragments) > m
        )


def test_the_syncers_part_has_the_bytes_of_its_clock(tmp_path: pathlib.Path):
  with served_run(settings(), tmp_path) as run:
    a = LoopLearner(run.address, "a", paced(0.01))
    with learners(a):
      wait_for(lambda: run.status().fragments[1].version.n > 1)
      over = run.syncer.take_snapshot()

  with Checkpoints(pathlib.Path(over.path) / "syncer", read_only=True) as part:
    params = fragments.flatten(part.restore(0)["params"])
    state = part.records(0)["state"]

  assert tuple(over.skipped) == ("a: it keeps no checkpoints",)
  versions = [tuple(f[0]) for f in state["fragments"]]
  assert versions == [tuple(v) for v in over.clock]
  assert all(np.isfinite(x).all() for x in params.values())


def test_who_asks_in_the_moment_in_which_a_cut_ends_has_it(tmp_path):
  with served_run(settings(lease_s=2.0), tmp_path) as run:
    mute = Client(run.address, learner="mute")
    digest = mute.get_run().layout.digest()
    hello = port.Hello(learner="mute", nonce="n", layout_digest=digest)
    next(iter(mute.join(hello).notices()))
    syncer = run.syncer
    syncer.request_snapshot()
    wait_for(lambda: syncer.state.cut.copied)
    with syncer._lock:  # So that its timer does not come first.
      until = syncer.state.cut.until
      wait_for(lambda: syncer._now() >= until)

      over = syncer.take_snapshot()

    mute.close()
  assert over.snapshot == 1
  assert over.skipped[0].startswith("mute: ")


class Disk(OsFiles):
  """Does something where a manifest is begun, or has just got its name."""

  def __init__(self, begun=lambda: None, named=lambda: None):
    self.begun, self.named = begun, named

  def create(self, path):
    if path.name == "manifest.part":
      self.begun()
    return super().create(path)

  def rename(self, old, new):
    super().rename(old, new)
    if new.name == "manifest.json":
      self.named()


def fill_up():
  raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("how", ["no room", "removed", "number in use"])
def test_a_cut_that_cannot_be_written_costs_the_run_nothing(tmp_path, how):
  disk, cuts = Disk(), tmp_path / "snapshots"

  def save(part, tell):
    if how == "removed" and part.record.snapshot == 2:
      seal = cuts / "2" / "syncer" / "seal.json"
      wait_for(seal.exists)
      shutil.rmtree(cuts / "2")
    tell(None)

  with served_run(settings(), tmp_path, files=disk) as run:
    a = LoopLearner(run.address, "a", paced(0.01), save_cut=save)
    with learners(a):
      more_merges(run, 2)
      assert run.syncer.take_snapshot().snapshot == 1
      if how == "no room":
        disk.begun = fill_up
      elif how == "number in use":
        shutil.copytree(cuts / "1", cuts / "2")
        (cuts / "2" / "manifest.json").unlink()
      with pytest.raises(ServiceError, match="no snapshot was taken") as said:
        run.syncer.take_snapshot()
      alarms = run.status().alarms
      assert manifest.find(cuts / "latest").name == "1"
      disk.begun = lambda: None
      more_merges(run, 2)
      over = run.syncer.take_snapshot()
      assert a.error is None
    run.request_stop()
    assert run.wait().exit_code == 0

  assert said.value.code == "ABORTED"
  assert "snapshot 2 is not" in alarms[-1]
  lines = strict_lines(tmp_path / "metrics.jsonl")
  failed = [x["reason"] for x in lines if x.get("what") == "write_failed"]
  assert [reason in alarms for reason in failed] == [True]
  assert (over.snapshot, over.learners) == (3, ("a",))
  assert manifest.find(cuts / "latest").name == "3"
  assert tape.replay(tmp_path / "tape.jsonl").faults == ()


def test_a_manifest_holds_up_nobody_and_comes_before_the_answer(tmp_path):
  gate, begun, asked = threading.Event(), threading.Event(), []

  def wait():
    begun.set()
    gate.wait(60.0)

  with served_run(settings(), tmp_path, files=Disk(begun=wait)) as run:
    a = LoopLearner(run.address, "a", paced(0.01), save_cut=Part().save)
    with learners(a):
      more_merges(run, 2)
      who_asks = threading.Thread(
        target=lambda: asked.append(run.syncer.take_snapshot()), daemon=True
      )
      who_asks.start()
      begun.wait(60.0)

      more_merges(run, 4)
      assert not asked
      gate.set()
      who_asks.join(60.0)

  assert [over.snapshot for over in asked] == [1]
  assert manifest.read(tmp_path / "snapshots" / "1") == asked[0]


@pytest.mark.parametrize("durability", ["snapshot", "commit"])
def test_a_number_is_used_once_though_a_restart_has_forgotten_it(
  tmp_path, durability
):
  cfg = settings(run__durability=durability, run__checkpoint_every_s=1000.0)
  run_dir, killed = tmp_path / "run", tmp_path / "killed"
  disk = Disk(named=lambda: shutil.copytree(run_dir, killed))
  with served_run(cfg, run_dir, files=disk) as run:
    a = LoopLearner(run.address, "a", paced(0.01), save_cut=Part().save)
    with learners(a):
      more_merges(run, 4)
      first = run.syncer.take_snapshot()
  lines = (killed / "tape.jsonl").read_bytes().splitlines(keepends=True)
  merges = [i for i, line in enumerate(lines) if b'"type":"Merged"' in line]
  (killed / "tape.jsonl").write_bytes(b"".join(lines[: merges[-1]]))

  with served_run(cfg, killed, restore=True) as run:
    assert run.syncer.state.next_snapshot == 2
    b = LoopLearner(run.address, "b", paced(0.01), save_cut=Part().save)
    with learners(b):
      more_merges(run, 2)
      over = run.syncer.take_snapshot()
      assert b.error is None

  assert (over.snapshot, over.learners) == (2, ("b",))
  assert manifest.read(killed / "snapshots" / "1") == first
  assert tape.replay(killed / "tape.jsonl").faults == ()


def test_a_fresh_run_numbers_its_cuts_after_those_that_it_finds(tmp_path):
  (tmp_path / "snapshots" / "2").mkdir(parents=True)
  (tmp_path / "learners" / "a" / "snapshots" / "4").mkdir(parents=True)
  (tmp_path / "snapshots" / "of old").mkdir()

  with served_run(settings(), tmp_path) as run:
    a = LoopLearner(run.address, "a", paced(0.01), save_cut=Part().save)
    with learners(a):
      more_merges(run, 2)
      over = run.syncer.take_snapshot()

  assert over.snapshot == 5
  assert tape.replay(tmp_path / "tape.jsonl").faults == ()


def more_merges(run, num):
  def merges():
    return sum(f.version.n for f in run.status().fragments)

  wanted = merges() + num
  wait_for(lambda: merges() >= wanted)
