"""A run's tapes and payloads give its Theta again, bit for bit."""

import contextlib
import json
import shutil

import numpy as np
import pytest

from ddiloco_jax.cli import replay
from ddiloco_jax.launch import arrays, replaying
from ddiloco_jax.protocol import events
from ddiloco_jax.syncer import payloads
from ddiloco_jax.syncer.inbox import Reply
from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.served import wait_for


def recorded(run_dir, num_merges=6, restore=False, **extra):
  """A run of two learners over gRPC, up to so many merges of each fragment."""
  cfg = settings(
    quorum=1,
    run__record_payloads=True,
    wire__up_format="bfloat16",
    outer__momentum=0.5,
    outer__learning_rate=0.7,
    **extra,
  )
  with served_run(cfg, run_dir, restore=restore) as run:
    ada = LoopLearner(run.address, "ada", paced(0.01, target=1.0))
    bob = LoopLearner(run.address, "bob", paced(0.02, target=-2.0))
    with learners(ada, bob):
      wait_for(
        lambda: min(f.version.n for f in run.status().fragments) >= num_merges
      )
      run.request_stop()
      run.wait()
    tensors, _ = run.syncer.snapshot()
  return tensors


def heads(run_dir):
  """The headers of the tapes, oldest first."""
  paths = [*sorted(run_dir.glob("tape.*.jsonl")), run_dir / "tape.jsonl"]
  return [json.loads(path.read_text().split("\n", 1)[0]) for path in paths]


def walk(run_dir):
  done = replaying.ThetaReplay(run_dir)
  num_versions = sum(1 for _ in done.versions())
  return done, num_versions


def test_every_version_of_a_run_comes_out_bit_for_bit(tmp_path, capsys):
  tensors = recorded(tmp_path / "run")

  done, num_versions = walk(tmp_path / "run")
  code = replay.main(
    [str(tmp_path / "run"), "--theta", f"--out={tmp_path / 'out'}"]
  )

  assert (done.faults, done.gaps, done.notes) == ([], [], [])
  assert done.num_merges >= 12
  assert (done.num_compared, num_versions) == (
    done.num_merges,
    done.num_merges + 2,
  )
  assert done.num_checkpoints >= 1
  assert code == 0, capsys.readouterr().out
  written = arrays.load_arrays(str(tmp_path / "out" / "params.npz"))
  for part in tensors.theta:
    for path, want in part.items():
      np.testing.assert_array_equal(written[path], want)


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
  """A run that was started again: its directory."""
  run_dir = tmp_path_factory.mktemp("twice") / "run"
  recorded(run_dir)
  recorded(run_dir, num_merges=16, restore=True)
  return run_dir


@pytest.fixture
def run_dir(two_epochs, tmp_path):
  """A copy of it, to be spoiled."""
  return shutil.copytree(two_epochs, tmp_path / "copy")


def test_an_epoch_begins_with_the_bits_that_the_one_before_ended_with(run_dir):
  done, _ = walk(run_dir)

  assert (done.faults, done.gaps) == ([], [])
  assert done.num_epochs == 2
  assert done.num_compared == done.num_merges >= 20


def test_the_first_version_that_differs_is_named(run_dir, capsys):
  path = run_dir / "tape.1.jsonl"
  lines = path.read_text().splitlines()
  at = [i for i, line in enumerate(lines) if '"Merged"' in line][4]
  values = json.loads(lines[at])
  values["event"]["digest"] = "0" * 32
  lines[at] = json.dumps(values)
  path.write_text("\n".join(lines) + "\n")

  code = replay.main([str(run_dir), "--theta"])

  out = capsys.readouterr().out
  n = values["event"]["version"][1]
  assert code == 1
  assert f"DIFFERS: tape.1.jsonl, line {at + 1}: version {n} (epoch 1)" in out


def test_an_epoch_that_began_with_other_tensors_is_named(run_dir):
  path = run_dir / "payloads" / "2-start.npz"
  with np.load(path) as loaded:
    values = dict(loaded)
  name = next(name for name in values if name.startswith("outer:1"))
  values[name] = values[name] + np.float32(1e-3)
  np.savez(path, **values)

  done, _ = walk(run_dir)

  assert len(done.faults) == 1
  assert done.faults[0].startswith("epoch 2 began with version")
  assert "of fragment 1, of other bits" in done.faults[0]


def test_a_checkpoint_of_other_bits_is_named(run_dir, monkeypatch):
  # What a disk may do: the saved parameters are those of another moment.
  read = replaying.Checkpoints.restore

  def restore(self, step):
    trees = read(self, step)
    first = next(iter(trees["params"]))
    trees["params"][first] = trees["params"][first] + 1
    return trees

  monkeypatch.setattr(replaying.Checkpoints, "restore", restore)

  done, _ = walk(run_dir)

  assert done.faults[0].startswith("checkpoint")


def test_a_flipped_byte_of_a_payload_is_named(run_dir, capsys):
  path = run_dir / "payloads" / "1-0.bin"
  data = bytearray(path.read_bytes())
  data[-1] ^= 0x40
  path.write_bytes(data)

  code = replay.main([str(run_dir), "--theta"])

  assert code == 2
  assert f"{path}, byte" in capsys.readouterr().err


def test_what_was_not_recorded_is_a_gap_and_the_rest_is_compared(run_dir):
  path = run_dir / "payloads" / "1-0.bin"
  data = path.read_bytes()
  path.write_bytes(data[: len(data) // 2])  # As a killed syncer leaves it.

  done, _ = walk(run_dir)

  assert done.faults == []
  assert len(done.gaps) == 1
  assert "its replies were not recorded" in done.gaps[0]
  assert done.num_epochs == 2  # The second has a start of its own.


def test_an_epoch_without_payloads_is_a_gap(run_dir, capsys):
  (run_dir / "payloads" / "1-start.npz").unlink()

  code = replay.main([str(run_dir), "--theta", "--json"])

  last = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert code == 1
  assert last["gaps"] == [
    "epoch 1 has no recorded start: it was run without --record_payloads, or"
    " its disk was full",
    "checkpoint 0 holds version 0 (epoch 1) of fragment 0, not done again",
  ]
  assert (last["faults"], last["num_epochs"]) == ([], 1)


def test_a_run_without_any_payload_has_no_theta_to_write(run_dir, capsys):
  shutil.rmtree(run_dir / "payloads")

  code = replay.main([str(run_dir), "--theta", f"--out={run_dir / 'out'}"])

  assert code == 1
  assert capsys.readouterr().out.count("has no recorded start") == 2
  assert not (run_dir / "out").exists()


def test_another_machine_is_said_beside_the_result(run_dir):
  for name in ("tape.1.jsonl", "tape.jsonl"):
    path = run_dir / name
    first, rest = path.read_text().split("\n", 1)
    head = json.loads(first)
    assert head["libraries"]["jax"]
    head["machine"] = "abacus"
    head["libraries"]["jax"] = "0.0.1"
    path.write_text(json.dumps(head) + "\n" + rest)

  done, _ = walk(run_dir)

  assert done.faults == []
  assert [note.split(" was ")[0] for note in done.notes] == [
    "machine type",
    "jax",
  ]


@pytest.fixture
def begun_afresh(tmp_path):
  """A run whose first syncer merged nothing, and left no checkpoint."""
  run_dir = tmp_path / "run"
  with served_run(settings(run__record_payloads=True), run_dir) as run:
    run.request_stop()
    run.wait()
  shutil.rmtree(run_dir / "checkpoints")
  recorded(run_dir, restore=True)
  return run_dir


def test_an_epoch_that_began_afresh_is_no_difference(begun_afresh):
  first, second = heads(begun_afresh)
  assert first["run_id"] != second["run_id"]

  done, _ = walk(begun_afresh)

  assert (done.faults, done.gaps, done.num_epochs) == ([], [], 2)
  assert done.num_compared == done.num_merges >= 12


def test_a_run_that_began_afresh_after_merges_is_named(run_dir, begun_afresh):
  # Another run's tape in front: its merges led to nothing.
  shutil.copy(run_dir / "tape.1.jsonl", begun_afresh / "tape.1.jsonl")
  shutil.copytree(
    run_dir / "payloads",
    begun_afresh / "payloads",
    ignore=shutil.ignore_patterns("2-*"),
    dirs_exist_ok=True,
  )

  done, _ = walk(begun_afresh)

  assert done.faults[0] == (
    "epoch 2 began with version 0 (epoch 2) of fragment 0, afresh, and the"
    " tapes before have merges"
  )


def cut_in_header(run_dir, name):
  path = run_dir / name
  path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("name", ["tape.1.jsonl", "tape.jsonl"])
@pytest.mark.parametrize(
  "spoil", [lambda d, n: (d / n).unlink(), cut_in_header]
)
def test_an_epoch_whose_tape_is_missing_is_lacking(
  run_dir, capsys, name, spoil
):
  epoch = 1 if name == "tape.1.jsonl" else 2
  spoil(run_dir, name)

  code = replay.main([str(run_dir), "--theta", "--json"])

  last = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert code == 1
  assert last["faults"] == []
  assert (
    f"epoch {epoch} has payloads, and no tape of it has a whole header"
    in last["gaps"]
  )


def test_an_epoch_goes_on_from_versions_of_tapes_before(run_dir):
  for path in [run_dir / "tape.1.jsonl", *run_dir.glob("payloads/1-*")]:
    path.unlink()

  done, _ = walk(run_dir)

  assert done.faults == []
  assert done.gaps[0].startswith("epoch 2 began with version")
  assert done.gaps[0].endswith("which no tape before has a merge of")
  assert done.num_merges >= 8  # It has a start of its own.


def test_a_checkpoint_that_is_not_compared_is_lacking_and_not_counted(run_dir):
  for path in [run_dir / "tape.jsonl", *run_dir.glob("payloads/2-*")]:
    path.unlink()
  num_saved = sum(
    x.name.isdecimal() for x in (run_dir / "checkpoints").iterdir()
  )

  done, _ = walk(run_dir)

  assert done.faults == []
  assert done.num_checkpoints < num_saved
  (gap,) = done.gaps
  assert gap.startswith("checkpoint ")
  assert "(epoch 2)" in gap


def test_a_copy_of_a_tape_is_no_epoch(run_dir):
  shutil.copy(run_dir / "tape.1.jsonl", run_dir / "tape.2.jsonl")

  done, _ = walk(run_dir)

  assert done.faults == [
    "tape.2.jsonl is of epoch 1, and a tape before it of epoch 1: it is a copy,"
    " or out of its place"
  ]


def test_a_tape_under_the_name_of_another_epoch_is_named(run_dir):
  (run_dir / "tape.1.jsonl").rename(run_dir / "tape.7.jsonl")

  done, _ = walk(run_dir)

  assert done.faults == [
    "tape.7.jsonl is of epoch 1: a tape that is set aside is named for its epoch"
  ]


def test_epochs_of_failed_starts_are_not_lacking(two_epochs, tmp_path):
  run_dir = shutil.copytree(two_epochs, tmp_path / "copy")
  journal = run_dir / "journal"
  (journal / "3-0.log").touch()  # It took its epoch, and was killed.
  recorded(run_dir, num_merges=20, restore=True)
  assert [head["epoch"] for head in heads(run_dir)] == [1, 2, 4]

  done, _ = walk(run_dir)

  assert (done.faults, done.gaps, done.num_epochs) == ([], [], 3)


def test_a_run_that_goes_on_from_a_cut_lacks_nothing(tmp_path):
  cfg = settings(quorum=1, run__record_payloads=True)
  with served_run(cfg, tmp_path / "old") as run:
    ada = LoopLearner(
      run.address,
      "ada",
      paced(0.01, target=1.0),
      save_cut=lambda part, tell: tell(None),
    )
    with learners(ada):
      wait_for(lambda: min(f.version.n for f in run.status().fragments) >= 3)
      run.syncer.take_snapshot()
  cut = tmp_path / "old" / "snapshots" / "latest"
  with served_run(cfg, tmp_path / "new", snapshot=cut) as run:
    run.request_stop()
    run.wait()

  done, num_versions = walk(tmp_path / "new")

  assert (done.faults, done.gaps) == ([], [])
  assert (done.num_epochs, num_versions) == (1, 2)
  assert done.num_checkpoints >= 1


@pytest.mark.parametrize("num_bytes", [0, 1, 10, 200, -1, -30])
def test_a_start_that_is_cut_is_damaged(run_dir, capsys, num_bytes):
  path = run_dir / "payloads" / "2-start.npz"
  path.write_bytes(path.read_bytes()[:num_bytes])

  code = replay.main([str(run_dir), "--theta"])

  assert code == 2
  assert f"{path} cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize("offset", range(0, 120, 7))
def test_a_flipped_byte_of_a_start_is_damage_or_changes_nothing(
  tmp_path, offset
):
  start = {"theta:0:w": np.arange(4, dtype=np.float32)}
  payloads.PayloadWriter(tmp_path, 1, start).close()
  path = tmp_path / "1-start.npz"
  data = bytearray(path.read_bytes())
  for at in (offset, -1 - offset):  # Heads of the zip are at both ends.
    for bit in range(8):
      data[at] ^= 1 << bit
      path.write_bytes(data)
      data[at] ^= 1 << bit

      with contextlib.suppress(payloads.DamagedPayload):
        found = payloads.PayloadReader(tmp_path, 1).start()
        assert [*found] == [*start]
        np.testing.assert_array_equal(found["theta:0:w"], start["theta:0:w"])


@pytest.mark.parametrize(
  "name", ["params/_METADATA", "contents/metadata", "state/metadata"]
)
def test_a_damaged_checkpoint_is_named(run_dir, capsys, name):
  step = max(int(path.name) for path in (run_dir / "checkpoints").iterdir())
  path = run_dir / "checkpoints" / str(step)
  damaged = path / name
  damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])

  code = replay.main([str(run_dir), "--theta"])

  assert code == 2
  err = capsys.readouterr().err
  assert f"{path} cannot be read: " in err
  assert "disk not full" not in err  # It is nothing that was written.


def test_out_over_a_file_is_refused_before_the_replay(run_dir, capsys):
  out = run_dir / "out"
  out.write_text("mine")

  with pytest.raises(SystemExit, match="2"):
    replay.main([str(run_dir), "--theta", f"--out={out}"])

  said = capsys.readouterr()
  assert f"--out={out} is a file" in said.err
  assert said.out == ""


def test_an_out_that_cannot_be_written_is_named(run_dir, capsys):
  (run_dir / "file").write_text("mine")
  out = run_dir / "file" / "out"

  code = replay.main([str(run_dir), "--theta", f"--out={out}"])

  assert code == 2
  err = capsys.readouterr().err
  assert f"cannot write --out={out}: " in err
  assert "tape.jsonl" not in err


# --- the files ----------------------------------------------------------------


def merge_of(n, num_bytes=100):
  key = events.ReplyKey("ada", 1, 0, n, 0)
  effect = events.Merge(
    fragment=0,
    round=n,
    attempt=0,
    version=events.Version(1, n),
    inputs=(events.MergeInput(key, 1.0),),
  )
  return key, effect, [Reply({}, "float32", bytes([n]) * num_bytes)]


def test_payload_files_rotate_and_every_reply_is_found(tmp_path):
  writer = payloads.PayloadWriter(tmp_path, 1, {}, file_bytes=1000)
  for n in range(30):
    _, effect, replies = merge_of(n)
    writer.write(effect, replies)
  writer.close()

  reader = payloads.PayloadReader(tmp_path, 1)

  assert len(list(tmp_path.glob("1-*.bin"))) >= 4
  for n in range(30):
    key, _, (reply,) = merge_of(n)
    assert reader.get(key) == ("float32", reply.data)
  assert reader.get(merge_of(30)[0]) is None
  assert payloads.PayloadReader(tmp_path, 2).get(merge_of(0)[0]) is None


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path):
  free, told = [1 << 40], []
  writer = payloads.PayloadWriter(
    tmp_path, 1, {}, told.append, num_free=lambda path: free[0]
  )
  for n in range(4):
    if n == 2:
      free[0] = 1000
    _, effect, replies = merge_of(n)
    writer.write(effect, replies)
  writer.close()

  reader = payloads.PayloadReader(tmp_path, 1)

  found = [reader.get(merge_of(n)[0]) is not None for n in range(4)]
  assert found == [True, True, False, False]
  assert len(told) == 1
  assert "from version 2 of fragment 0 on" in told[0]


def test_a_start_that_does_not_fit_ends_the_recording_and_not_the_run(tmp_path):
  # A standby that takes over meets the disk that the other one has filled.
  start, told = {"theta:0:w": np.zeros(4, np.float32)}, []

  writer = payloads.PayloadWriter(
    tmp_path, 2, start, told.append, num_free=lambda path: 1000
  )
  writer.write(*merge_of(0)[1:])
  writer.close()

  assert "from the start of epoch 2 on" in told[0]
  assert "1000 bytes are left" in told[0]
  assert len(told) == 1
  assert not payloads.PayloadReader(tmp_path, 2).has_start
