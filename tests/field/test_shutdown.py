"""SIGTERM and SIGINT in the middle of a run: in order, in time, with code 0."""

import signal
import time

import numpy as np
import pytest

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments
from ddiloco_jax.launch import exits, syncing
from ddiloco_jax.launch.relay import Relay
from ddiloco_jax.learner.client import Client
from ddiloco_jax.protocol import events, tape
from ddiloco_jax.training.checkpoint import Checkpoints
from ddiloco_jax.wire.tokens import ONLOOKER
from tests.support import small
from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
)
from tests.support.processes import (
  SYNCER,
  TRAIN,
  address_of,
  catches,
  ending,
  has_loaded,
  has_open,
  module,
  overrides,
)
from tests.support.served import wait_for

GRACE_S = 20.0
THETA = {name: np.zeros(1 << 20, np.float32) for name in ("a", "b")}
SHAPES = {path: array.shape for path, array in THETA.items()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_syncer_asked_to_stop_ends_in_order(tmp_path, number):
  # [T8] Four active streams, a merge under way.
  run_dir = tmp_path / "run"
  np.savez(tmp_path / "theta.npz", **THETA)
  with ending() as start:
    syncer = start(
      module(
        SYNCER,
        "--config=tests/support/small.py",
        f"--run_dir={run_dir}",
        "--address=127.0.0.1:0",
        f"--layout_arrays={tmp_path / 'theta.npz'}",
        *overrides(sync__num_fragments=2, sync__cycle_steps=2, sync__quorum=4),
      ),
      tmp_path / "syncer.log",
    )
    address = address_of(run_dir, syncer)
    four = [
      LoopLearner(address, f"l{i}", paced(0.1, shapes=SHAPES)) for i in range(4)
    ]
    watcher = Client(address, learner=ONLOOKER)
    with learners(*four):
      wait_for(lambda: min(versions(watcher)) >= 2, 60.0)
      until = time.monotonic() + 10.0  # A merge may be too short to be seen.
      wait_for(lambda: "merging" in phases(watcher) or time.monotonic() > until)
      syncer.signal(number)
      asked = time.monotonic()
      code = syncer.wait(GRACE_S)
      took_s = time.monotonic() - asked
      reasons = [learner.end() for learner in four]
    watcher.close()

  assert code == 0, syncer.said()
  assert took_s < GRACE_S
  assert all(signal.Signals(number).name in reason for reason in reasons)
  stopped = [
    line
    for line in tape.Reader(run_dir / "tape.jsonl").lines()
    if isinstance(line.event, events.StopRequested)
  ]
  assert len(stopped) == 1
  assert sum(m.live for m in stopped[0].state.learners.values()) == 4
  replayed = tape.replay(run_dir / "tape.jsonl")
  assert (replayed.faults, replayed.torn, replayed.closed) == ((), False, True)
  with Checkpoints(run_dir / "checkpoints", read_only=True) as saved:
    params = fragments.flatten(saved.restore(saved.latest())["params"])
  for learner in four:
    for path, array in learner.trainer.params.items():
      np.testing.assert_array_equal(array, params[path])
  restored_versions(run_dir, replayed.state)


def restored_versions(run_dir, state):
  cfg = config.from_json((run_dir / "config.json").read_text())
  run = syncing.SyncerRun(cfg, str(run_dir), restore=True, theta=THETA)
  try:
    status = run.syncer.status()
  finally:
    run.close()
  assert status.epoch == 2
  assert [f.version.n for f in status.fragments] == [
    f.version.n for f in state.fragments
  ]
  assert status.phase != "finished"


def versions(watcher):
  return [f.version.n for f in watcher.status().fragments]


def phases(watcher):
  return [r.phase for r in watcher.status().rounds]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_learner_asked_to_stop_says_goodbye_and_saves(tmp_path, number):
  # [T8] Its last report, its checkpoint; the other learner goes on.
  cfg = config.freeze(small.get_config())
  run_dir = tmp_path / "run"
  theta = syncing.init_params(cfg)
  shapes = {path: array.shape for path, array in theta.items()}
  with (
    served_run(cfg, run_dir, theta=theta) as run,
    ending() as start,
  ):
    leaving = start(
      module(
        TRAIN,
        "--config=tests/support/small.py",
        f"--run_dir={run_dir}",
        f"--syncer={run.address}",
        "--learner_id=leaving",
      ),
      tmp_path / "learner.log",
    )
    staying = LoopLearner(run.address, "staying", paced(0.05, shapes=shapes))
    with learners(staying):

      def step():
        return next(
          (m.step for m in run.status().learners if m.learner == "leaving"), 0
        )

      leaving.wait_for(lambda: step() >= 10, 120.0)
      leaving.signal(number)
      asked = time.monotonic()
      code = leaving.wait(GRACE_S)
      took_s = time.monotonic() - asked
      told = next(m for m in run.status().learners if m.learner == "leaving")
      merges = sum(f.version.n for f in run.status().fragments)
      wait_for(
        lambda: sum(f.version.n for f in run.status().fragments) >= merges + 4
      )

  assert code == 0, leaving.said()
  assert took_s < GRACE_S
  assert not told.live
  seen = [  # On its control stream; a reply may still be under way.
    line.event
    for line in tape.Reader(run_dir / "tape.jsonl").lines()
    if getattr(line.event, "learner", "") == "leaving"
    and isinstance(line.event, events.Reported | events.Left)
  ]
  assert isinstance(seen[-1], events.Left)
  assert isinstance(seen[-2], events.Reported)
  directory = run_dir / "learners" / "leaving" / "checkpoints"
  with Checkpoints(directory, read_only=True) as saved:
    assert saved.latest() == seen[-2].step
    trees = saved.restore(saved.latest())
    progress = saved.records(saved.latest())["progress"]
  params = fragments.flatten(trees["params"])
  assert {path: array.shape for path, array in params.items()} == shapes
  assert [tuple(p) for p in progress["positions"]] == list(seen[-2].positions)


NOBODY = "--syncer=127.0.0.1:9"
SMALL = "--config=tests/support/small.py"
STARTING = {  # Command -> its flags, beside the run's directory.
  "syncer": (SYNCER, SMALL, "--address=127.0.0.1:0"),
  "standby": (
    *(SYNCER, SMALL, "--address=127.0.0.1:0", "--standby"),
    "--config.run.standby_lease_s=5",
  ),
  "learner": (TRAIN, SMALL, NOBODY),
  "plain training": (TRAIN, SMALL),
  "numpy learner": (
    *("ddiloco_jax.launch.numpy_learner", NOBODY, "--learner_id=0"),
  ),
}


@pytest.mark.parametrize("command", STARTING)
def test_a_command_ends_in_order_from_before_its_slow_imports_on(
  tmp_path, command
):
  name, *flags = STARTING[command]
  run_dir = tmp_path / "run"
  argv = module(name, *flags, f"--run_dir={run_dir}")
  if command == "numpy learner":  # It reads the settings of its syncer.
    run_dir.mkdir()
    settings = config.to_json(config.freeze(small.get_config()))
    (run_dir / "config.json").write_text(settings)
  with ending() as start:
    early, late = (start(argv, tmp_path / f"{n}.log") for n in range(2))

    early.wait_for(lambda: catches(early.pid, signal.SIGTERM))
    assert not has_loaded(early.pid, "grpc")
    assert not has_loaded(early.pid, "jaxlib")
    early.signal()
    late.wait_for(lambda: has_loaded(late.pid, "grpc"))
    late.signal()

    assert early.wait() == exits.OK, early.said()
    assert late.wait() == exits.OK, late.said()


def test_a_syncer_asked_to_stop_while_it_restores_ends_in_order(tmp_path):
  run_dir = tmp_path / "run"
  argv = module(*STARTING["syncer"], f"--run_dir={run_dir}")
  codes = []
  with ending() as start:
    for more in ((), ("--restore",), ("--restore",)):
      syncer = start([*argv, *more], tmp_path / "syncer.log")
      syncer.wait_for(
        lambda syncer=syncer: has_open(syncer.pid, run_dir / "lock")
      )
      syncer.signal()
      codes.append(syncer.wait())

  assert codes == [exits.OK] * 3, (tmp_path / "syncer.log").read_text()


def test_a_learner_without_a_syncer_for_too_long_saves_and_exits(tmp_path):
  # Nobody answers on the syncer's address any more.
  editable = small.get_config()
  editable.sync.lease_s = 1.5
  cfg = config.freeze(editable)
  run_dir = tmp_path / "run"
  file = tmp_path / "impatient.py"
  file.write_text(
    "from tests.support import small\n\n\n"
    "def get_config():\n"
    "  cfg = small.get_config()\n"
    "  cfg.sync.lease_s = 1.5\n"
    "  return cfg\n"
  )
  with (
    served_run(cfg, run_dir, theta=syncing.init_params(cfg)) as run,
    ending() as start,
  ):
    proxy = Relay(run.address)
    learner = start(
      module(
        TRAIN,
        f"--config={file}",
        f"--run_dir={run_dir}",
        f"--syncer={proxy.address}",
        *overrides(run__max_solo_s=3.0, wire__keepalive_s=1.0),
      ),
      tmp_path / "learner.log",
    )
    learner.wait_for(
      lambda: any(m.step >= 10 for m in run.status().learners), 120.0
    )
    proxy.close()
    cut = time.monotonic()
    code = learner.wait(GRACE_S)
    took_s = time.monotonic() - cut
    (told,) = run.status().learners

  assert code == exits.NO_SYNCER, learner.said()
  assert took_s >= 3.0
  assert "limit 3 s" in learner.said()
  directory = run_dir / "learners" / "0" / "checkpoints"
  with Checkpoints(directory, read_only=True) as saved:
    # It trained on alone, and saved where it came to.
    assert saved.latest() > told.step
