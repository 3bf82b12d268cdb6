"""A run that is started a second time: ended, refused or killed too early."""

import contextlib
import pathlib
import re
import shutil
import signal
import socket
import threading

import numpy as np
import pytest

from ddiloco_jax.launch import exits, serving, syncing
from ddiloco_jax.protocol import tape
from ddiloco_jax.report import chronicle
from ddiloco_jax.syncer.errors import InUse
from ddiloco_jax.syncer.exporter import Exporter
from ddiloco_jax.syncer.store import Store
from tests.support.over_grpc import (
  THETA,
  Held,
  LoopLearner,
  ServedRun,
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
  overrides,
)
from tests.support.served import wait_for


def train_to_the_end(run):
  with learners(LoopLearner(run.address, "ada", paced(0.02))):
    return run.wait(60.0)


def files_of(run_dir):
  return {p.name: p.read_bytes() for p in run_dir.iterdir() if p.is_file()}


def command(base, *flags, **changes):
  """A syncer of `settings()`, as a command."""
  np.savez(base / "theta.npz", **THETA)
  same = {
    "sync__num_fragments": 2,
    "sync__cycle_steps": 4,
    "outer__learning_rate": 1.0,
    "outer__momentum": 0.0,
    **changes,
  }
  return module(
    SYNCER,
    "--config=tests/support/small.py",
    f"--run_dir={base / 'run'}",
    f"--layout_arrays={base / 'theta.npz'}",
    *flags,
    *overrides(**same),
  )


# --- a run that has reached its end ----------------------------------------------


@pytest.mark.parametrize(
  ("limit", "value", "more"),
  [("num_syncer_steps", 12, 24), ("num_tokens", 800, 2000)],
)
def test_a_run_at_its_limit_is_refused_until_the_limit_is_raised(
  tmp_path, limit, value, more
):
  run_dir = tmp_path / "run"
  with served_run(settings(**{limit: value}), run_dir) as run:
    assert train_to_the_end(run).exit_code == 0
    ended = run.status()
  files = files_of(run_dir)

  with (
    pytest.raises(ValueError, match=rf"has ended.*sync\.{limit}=N") as caught,
    served_run(settings(**{limit: value}), run_dir, restore=True),
  ):
    pass

  assert str(value) in str(caught.value)
  assert files_of(run_dir) == files
  with served_run(settings(**{limit: more}), run_dir, restore=True) as run:
    assert run.status().epoch == 2
    assert limit in train_to_the_end(run).reason
    for before, after in zip(ended.fragments, run.status().fragments):
      assert after.version.n > before.version.n


def test_a_run_that_was_stopped_goes_on(tmp_path):
  cfg = settings(num_syncer_steps=40)
  with served_run(cfg, tmp_path / "run") as run:
    run.request_stop()
    assert "stop_requested" in run.wait(20.0).reason

  with served_run(cfg, tmp_path / "run", restore=True) as run:
    assert "num_syncer_steps" in train_to_the_end(run).reason


def test_a_run_that_was_killed_in_its_end_comes_to_its_end(tmp_path):
  # The limit is reached, and a learner still waits to be told.
  cfg = settings(num_syncer_steps=12)
  with served_run(cfg, tmp_path / "run") as run:
    train_to_the_end(run)
    tensors, _ = run.syncer.snapshot()
    record = run.run._record
  in_its_end = next(
    line.state
    for line in tape.Reader(tmp_path / "run" / "tape.jsonl").lines()
    if line.state.end
  )
  killed = Store(str(tmp_path / "killed"), restore=False)
  killed.begin(record["run_id"])
  killed.save(tensors, in_its_end, record)
  killed.close()

  with served_run(cfg, tmp_path / "killed", restore=True) as run:
    learner = LoopLearner(run.address, "ada", paced(0.02))
    with learners(learner):
      finished = run.wait(30.0)
      told = learner.end()

  assert finished.exit_code == 0
  assert finished.missing == ()
  assert "num_syncer_steps" in told


def test_the_command_refuses_a_limit_that_a_killed_run_is_beyond(tmp_path):
  run_dir, flags = tmp_path / "run", ("--address=127.0.0.1:0",)
  with ending() as start:
    first = start(command(tmp_path, *flags), tmp_path / "1.log")
    address = address_of(run_dir, first)
    with learners(LoopLearner(address, "ada", paced(0.02))) as (ada,):
      wait_for(lambda: len(ada.adopted) >= 8)
      first.signal(signal.SIGKILL)
      first.wait()
      files = files_of(run_dir)
      flags = (f"--address={address}", "--restore")
      low = command(tmp_path, *flags, sync__num_syncer_steps=3)
      refused = start(low, tmp_path / "2.log")
      code = refused.wait(60.0)
      same = files_of(run_dir) == files
      third = start(
        command(tmp_path, *flags, sync__num_syncer_steps=0), tmp_path / "3.log"
      )
      address_of(run_dir, third)
      wait_for(lambda: ada.link.welcome.epoch == 2)
      assert ada.is_alive()  # Nobody was sent home.

  assert code == exits.BAD_USAGE
  assert "Traceback" not in refused.said()
  assert "sync.num_syncer_steps is 3, and the run" in refused.said()
  assert same


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  """What a kill leaves of a run without a limit; a fragment has 6 merges."""
  base = tmp_path_factory.mktemp("killed")
  with (
    served_run(settings(), base / "run") as run,
    learners(LoopLearner(run.address, "ada", paced(0.02))),
  ):
    wait_for(lambda: min(f.version.n for f in run.status().fragments) >= 6)
    return shutil.copytree(base / "run", base / "killed")


@pytest.mark.parametrize(
  ("limit", "said"),
  [
    ("num_syncer_steps", r"t is (\d+)"),
    ("num_tokens", r"(\d+) tokens are merged"),
  ],
)
def test_a_limit_at_or_below_what_a_killed_run_has_reached_is_refused(
  tmp_path, killed, limit, said
):
  run_dir = pathlib.Path(shutil.copytree(killed, tmp_path / "run"))
  files = files_of(run_dir)
  reached = refused(run_dir, 3, limit, said)
  assert reached > 10
  assert refused(run_dir, reached, limit, said) == reached  # At it.

  assert files_of(run_dir) == files
  more = settings(**{limit: 2 * reached})
  with served_run(more, run_dir, restore=True) as run:
    assert run.status().epoch == 2
    assert limit in train_to_the_end(run).reason
  assert min(run.syncer.state.starts[-1]) >= 6


def refused(run_dir, value, limit, said):
  """What the refusal says that has been reached."""
  with (
    pytest.raises(exits.BadUsage) as caught,
    served_run(settings(**{limit: value}), run_dir, restore=True),
  ):
    pass
  told = str(caught.value)
  assert f"sync.{limit} is {value}, " in told
  assert f"--config.sync.{limit}=N), set it to 0" in told
  return int(re.search(said, told)[1])


def test_a_standby_goes_on_to_the_end_that_its_settings_have(tmp_path, killed):
  # Nobody is there to raise the limit.
  run_dir = pathlib.Path(shutil.copytree(killed, tmp_path / "run"))
  start = serving.Start(settings(num_syncer_steps=3), run_dir, THETA)
  with (
    serving.listening(start.cfg, "127.0.0.1:0", lambda: "") as at,
    serving.serving_at(at, start, restore=True, takes_over=2) as served,
  ):
    finished = train_to_the_end(ServedRun(served, run_dir))

  assert finished.exit_code == exits.OK
  assert "t has reached 3" in finished.reason


def test_a_run_killed_in_the_end_that_was_moved_ends_with_the_same_limit(
  tmp_path, killed
):
  # Its checkpoint is of the first start, which had no limit.
  run_dir = pathlib.Path(shutil.copytree(killed, tmp_path / "2"))
  gate = threading.Event()
  cfg = settings(num_syncer_steps=60, flush_s=60.0)
  with served_run(cfg, run_dir, restore=True) as run:
    ada = LoopLearner(
      run.address, "ada", paced(0.02), wrap=lambda client: Held(client, gate)
    )
    gate.set()
    with learners(ada):
      wait_for(lambda: run.status().t >= 50)
      gate.clear()
      wait_for(lambda: run.syncer.state.end)
      shutil.copytree(run_dir, tmp_path / "3")
      gate.set()
      run.wait()

  lower = settings(num_syncer_steps=59, flush_s=60.0)
  with (
    pytest.raises(exits.BadUsage, match=r"is 59, .*or back to 60, to end it"),
    served_run(lower, tmp_path / "3", restore=True),
  ):
    pass
  with served_run(cfg, tmp_path / "3", restore=True) as run:
    finished = train_to_the_end(run)
  assert finished.exit_code == exits.OK
  assert "t has reached 60" in finished.reason


def test_the_command_tells_that_a_run_has_ended(tmp_path):
  flags, limit = ("--address=127.0.0.1:0",), {"sync__num_syncer_steps": 8}
  with ending() as start:
    first = start(command(tmp_path, *flags, **limit), tmp_path / "1.log")
    address = address_of(tmp_path / "run", first)
    with learners(LoopLearner(address, "ada", paced(0.02))):
      assert first.wait(60.0) == exits.OK, first.said()
    syncer = start(
      command(tmp_path, *flags, "--restore", **limit), tmp_path / "2.log"
    )
    code = syncer.wait(60.0)

  assert code == exits.BAD_USAGE
  assert "t has reached 8" in syncer.said()
  assert "--config.sync.num_syncer_steps=N" in syncer.said()
  assert "Traceback" not in syncer.said()


def test_two_saves_of_the_same_merges_are_one(tmp_path):
  # The first is still being written when the run ends and saves again.
  theta = {
    "a": np.zeros((2000, 2000), np.float32),
    "b": np.zeros(5, np.float32),
  }
  cfg = settings(quorum=1, run__checkpoint_every_s=1000.0)
  shapes = {path: array.shape for path, array in theta.items()}
  with served_run(cfg, tmp_path / "run", theta=theta) as run:
    learner = LoopLearner(run.address, "ada", paced(0.02, shapes=shapes))
    with learners(learner):
      wait_for(lambda: sum(f.version.n for f in run.status().fragments) >= 3)
    run.run._save()
    run.run._save()
    run.run.store.wait()

    newest = run.run.store.checkpoints.latest()
    assert newest == sum(f.version.n for f in run.status().fragments)


# --- a first start that is refused -------------------------------------------------


def test_an_address_that_is_refused_leaves_no_run_behind(tmp_path):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    for address, error, told in (
      (f"127.0.0.1:{port}", InUse, "in use"),
      ("8470", ValueError, "HOST:PORT"),
      ("0.0.0.0:0", ValueError, "without TLS"),
    ):
      with (
        pytest.raises(error, match=told),
        serving.serving(
          serving.Start(settings(), tmp_path / "run", THETA), address
        ),
      ):
        pass

  assert not (tmp_path / "run").exists()
  with served_run(settings(num_syncer_steps=8), tmp_path / "run") as run:
    assert train_to_the_end(run).exit_code == 0


def test_fewer_calls_than_the_learners_hold_are_refused(tmp_path):
  cfg = settings(max_learners=8, wire__max_calls=23)

  with (
    pytest.raises(ValueError, match=r"wire\.max_calls is 23.*at least 24"),
    served_run(cfg, tmp_path / "run"),
  ):
    pass

  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("flags", "named"),
  [
    (("--address=8470",), "'8470'"),
    (("--address=127.0.0.1:70000",), "70000"),
    (("--address=127.0.0.1:0", "--metrics_port=70000"), "70000"),
  ],
)
def test_an_address_that_cannot_be_is_bad_usage(tmp_path, flags, named):
  with ending() as start:
    syncer = start(command(tmp_path, *flags), tmp_path / "log")
    code = syncer.wait(60.0)

  assert code == exits.BAD_USAGE
  assert named in syncer.said()
  assert "Traceback" not in syncer.said()


def test_a_directory_where_the_address_belongs_is_bad_usage(tmp_path):
  (tmp_path / "run" / "address").mkdir(parents=True)

  with (
    pytest.raises(exits.BadUsage, match=r"cannot write to .*run/address"),
    served_run(settings(), tmp_path / "run"),
  ):
    pass


def test_a_metrics_port_that_is_taken_leaves_no_run(tmp_path):
  with (
    contextlib.closing(Exporter("127.0.0.1", 0)) as exporter,
    ending() as start,
  ):
    _, _, port = exporter.address.rpartition(":")
    flags = ("--address=127.0.0.1:0", f"--metrics_port={port}")
    syncer = start(command(tmp_path, *flags), tmp_path / "log")
    code = syncer.wait(60.0)

  assert code == exits.IN_USE
  assert port in syncer.said()
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  "changed",
  ["num_fragments", "cycle_steps", "model__rope_theta", "wire__up_format"],
)
def test_settings_that_are_refused_at_a_restore_change_nothing(
  tmp_path, changed
):
  values = {
    "num_fragments": 1,
    "cycle_steps": 8,
    "model__rope_theta": 5000.0,
    "wire__up_format": "bfloat16",
  }
  run_dir = tmp_path / "run"
  with served_run(settings(num_syncer_steps=8), run_dir) as run:
    train_to_the_end(run)
  files = files_of(run_dir)

  with (
    pytest.raises(ValueError, match="may not change"),
    served_run(settings(**{changed: values[changed]}), run_dir, restore=True),
  ):
    pass

  assert files_of(run_dir) == files


@pytest.mark.parametrize(
  ("old", "new", "named"),
  [
    ({"name": "sgd"}, {"name": "adam"}, r"outer\.name is 'adam' .* 'sgd'"),
    ({"name": "adam"}, {"name": "yogi"}, r"outer\.name is 'yogi' .* 'adam'"),
    ({"momentum": 0.0}, {"momentum": 0.5}, r"outer\.momentum is 0\.5 .* 0\.0"),
    ({"momentum": 0.5}, {"momentum": 0.0}, r"outer\.momentum is 0\.0 .* 0\.5"),
  ],
)
def test_another_kind_of_outer_optimizer_is_refused(tmp_path, old, new, named):
  # Of adam and yogi the states look alike.
  old, new = (
    settings(**{f"outer__{name}": value for name, value in which.items()})
    for which in (old, new)
  )
  run_dir = tmp_path / "run"
  with served_run(old, run_dir) as run:
    run.syncer.take_snapshot()
    run.request_stop()
    run.wait()
  files = files_of(run_dir)
  snapshot = run_dir / "snapshots" / "1"

  for given in ({"restore": True}, {"snapshot": snapshot}):
    directory = run_dir if "restore" in given else tmp_path / "new"
    with (
      pytest.raises(exits.BadUsage, match=rf"{named}.*may not change.*Set"),
      served_run(new, directory, **given),
    ):
      pass

  assert files_of(run_dir) == files


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_settings_of_an_outer_optimizer_may_change(tmp_path, name):
  same = {"outer__name": name, "outer__momentum": 0.5}
  with served_run(settings(**same), tmp_path / "run"):
    pass
  same |= {"outer__momentum": 0.8, "outer__learning_rate": 0.1}

  cfg = settings(**same, outer__b1=0.5, outer__nesterov=False)
  with served_run(cfg, tmp_path / "run", restore=True) as run:
    assert run.status().epoch == 2


# --- a syncer that is killed before its first checkpoint ---------------------------


@pytest.mark.parametrize("restore", [False, True])
def test_a_run_without_a_checkpoint_begins_afresh(tmp_path, restore):
  # What a kill between the raised epoch and the first checkpoint leaves.
  run_dir = tmp_path / "run"
  killed = Store(str(run_dir), restore=False)
  killed.begin("run-1")
  killed.close()

  cfg = settings(num_syncer_steps=8)
  with served_run(cfg, run_dir, restore=restore) as run:
    assert train_to_the_end(run).exit_code == 0
    assert run.status().epoch == 2

  assert chronicle.read_history(run_dir).merges


def test_whoever_is_served_finds_a_checkpoint(tmp_path):
  # So a syncer that dies now comes back as the same run.
  with served_run(settings(), tmp_path / "run") as run:
    assert run.run.store.checkpoints.latest() == 0

    with pytest.raises(InUse, match="locked"):
      syncing.SyncerRun(settings(), str(tmp_path / "run"), theta=THETA)
  with pytest.raises(InUse, match="--restore"):
    syncing.SyncerRun(settings(), str(tmp_path / "run"), theta=THETA)


def test_a_directory_without_a_run_is_not_restored(tmp_path):
  with pytest.raises(InUse, match="no run to restore"):
    syncing.SyncerRun(
      settings(), str(tmp_path / "typo"), restore=True, theta=THETA
    )


def test_a_syncer_that_was_killed_while_it_started_restores(tmp_path):
  with ending() as start:
    flags = ("--address=127.0.0.1:0",)
    first = start(command(tmp_path, *flags), tmp_path / "1.log")
    first.wait_for((tmp_path / "run" / "journal" / "1-0.log").exists)
    first.signal(signal.SIGKILL)
    first.wait()
    second = start(command(tmp_path, *flags, "--restore"), tmp_path / "2.log")
    address_of(tmp_path / "run", second)
    second.signal(signal.SIGTERM)
    code = second.wait(30.0)

  assert code == exits.OK, second.said()


def test_a_full_disk_that_the_tape_meets_first_has_its_code(tmp_path):
  limit = ["bash", "-c", 'ulimit -f 60; exec "$@"', "limited"]  # KiB a file.
  argv = [*limit, *command(tmp_path, "--address=127.0.0.1:0")]
  with ending() as start:
    syncer = start(argv, tmp_path / "log")
    address = address_of(tmp_path / "run", syncer)
    with learners(LoopLearner(address, "ada", paced(0.005))):
      code = syncer.wait(60.0)

  assert code == exits.WRITE_FAILED
  assert "the tape in" in syncer.said()
