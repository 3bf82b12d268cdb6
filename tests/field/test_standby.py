"""A second syncer that takes over: nothing is lost, counted twice or mixed up."""

import contextlib
import itertools
import socket
import threading

import grpc
import optax
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ddiloco_jax.launch import exits, serving, standby
from ddiloco_jax.learner.client import Client
from ddiloco_jax.protocol import events, machine, tape
from ddiloco_jax.syncer import restoring
from ddiloco_jax.syncer.errors import InUse, Superseded, TooLate
from ddiloco_jax.syncer.files import OsFiles
from ddiloco_jax.syncer.journal import Journal
from ddiloco_jax.syncer.store import Store
from ddiloco_jax.syncer.watch import Watch
from ddiloco_jax.wire.options import WireConfig
from ddiloco_jax.wire.status import ServiceError
from ddiloco_jax.wire.tokens import ONLOOKER
from tests.support.books import check_merged
from tests.support.crashing import LAYOUT, TX, DurableRun
from tests.support.over_grpc import (
  THETA,
  LoopLearner,
  ServedRun,
  learners,
  paced,
  settings,
)
from tests.support.served import wait_for
from tests.support.standing_by import HangingFiles, standbys

LEASE_S = 6.0
WIRE = WireConfig(keepalive_s=0.5, keepalive_timeout_s=1.0)


def start_of(tmp_path, files=None, **changes):
  values = {
    "quorum": 1,
    "lease_s": 30.0,
    "run__standby_lease_s": LEASE_S,
    "run__checkpoint_every_s": 1000.0,
    **changes,
  }
  return serving.Start(settings(**values), tmp_path / "run", THETA, files=files)


@contextlib.contextmanager
def primary(start):
  with serving.serving(start, "127.0.0.1:0") as served:
    run = ServedRun(served, start.run_dir)
    yield run
    if run._error is None:
      run.request_stop()


def versions(served):
  return [f.version.n for f in served.run.syncer.state.fragments]


def merges(path):
  found = []
  for line in tape.Reader(path).lines():
    assert not line.fault
    if isinstance(line.event, events.Merged):
      found.append(line.event)
  return found


def health(address):
  with grpc.insecure_channel(address) as channel:
    asked = health_pb2.HealthCheckRequest(service="ddiloco.v1.Synchronizer")
    answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=30.0)
  return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def said_by(address):
  """What a syncer that does not serve yet answers a call of status with."""
  client = Client(address, learner=ONLOOKER)
  try:
    with pytest.raises(ServiceError) as caught:
      client.status()
  finally:
    client.close()
  assert caught.value.code == "UNAVAILABLE"
  return caught.value.text


def check_run(directory, last):
  """Versions are contiguous over the epochs, and every book is right."""
  tapes = [directory / f"tape.{last.epoch - 1}.jsonl", directory / "tape.jsonl"]
  for path in tapes:
    assert tape.replay(path).faults == ()
  for p, fragment in enumerate(last.fragments):
    old, new = (
      [m.version.n for m in merges(path) if m.fragment == p] for path in tapes
    )
    first = last.starts[-1][p]
    assert old == list(range(1, len(old) + 1))
    # One more may be durable than the tape of its syncer has come to.
    assert first in (len(old), len(old) + 1)
    assert new == list(range(first + 1, fragment.version.n + 1))
    assert len(new) >= 2
  check_merged(tapes, last)


def test_a_disk_that_hangs_is_left_to_the_standby(tmp_path):
  # Its writes return long after the standby has taken over.
  files = HangingFiles()
  start = start_of(tmp_path, files)
  with contextlib.ExitStack() as stack:
    old = stack.enter_context(primary(start))
    stack.callback(files.go_on)
    (one,) = stack.enter_context(standbys(start._replace(files=None)))
    addresses = (old.address, one.address)
    pair = [
      LoopLearner(addresses, name, paced(0.03), wire=WIRE)
      for name in ("ada", "bob")
    ]
    stack.enter_context(learners(*pair))
    wait_for(lambda: min(versions(old)) >= 3)
    assert health(old.address) == "SERVING"
    assert health(one.address) == "NOT_SERVING"

    files.hang()
    # Nothing returned by then: it was its own clock.
    with pytest.raises(Superseded, match=r"not renewed for|has begun"):
      old.wait(60.0)
    assert files.num_waiting
    steps = [len(each.steps) for each in pair]
    wait_for(lambda: one.served or one.error)
    assert one.error is None
    wait_for(lambda: all(each.link.welcome.epoch == 2 for each in pair))
    wait_for(lambda: min(versions(one.served)) >= max(versions(old)) + 3)
    assert all(len(each.steps) > n for each, n in zip(pair, steps))
    assert health(one.address) == "SERVING"
    written = sorted((start.run_dir / "journal").glob("1-*.log"))[-1]
    size = written.stat().st_size

    files.go_on()
    before = versions(old)
    wait_for(lambda: not files.num_waiting)
    one.stop()
    one.join(60.0)
    assert versions(old) == before
    assert one.finished.exit_code == 0
    for each in pair:
      each.end()
    assert written.stat().st_size >= size
    last = one.served.run.syncer.state
  check_run(start.run_dir, last)


def test_of_two_standbys_one_wins_and_the_other_stands_by_for_it(tmp_path):
  files = HangingFiles()
  start = start_of(tmp_path, files)
  with contextlib.ExitStack() as stack:
    old = stack.enter_context(primary(start))
    stack.callback(files.go_on)
    calm = start._replace(files=None)
    both = stack.enter_context(standbys(calm, calm))
    files.hang()
    with pytest.raises(Superseded):
      old.wait(60.0)
    wait_for(lambda: any(each.served for each in both))
    (won,) = (each for each in both if each.served)
    (lost,) = (each for each in both if not each.served)

    stands_by = f"stands by for {won.address} (epoch 2,"
    wait_for(lambda: stands_by in said_by(lost.address))
    assert health(lost.address) == "NOT_SERVING"
    assert won.served.run.syncer.get_run().epoch == 2
    files.go_on()
    won.stop()  # In order: the run has ended, and nobody takes over.
    won.join(60.0)
    lost.join(60.0)
    assert won.finished.exit_code == 0
    assert isinstance(lost.error, standby.StoodDown)
    assert lost.error.exit_code == 0
    assert "the run has ended" in str(lost.error)
    assert lost.served is None


def test_a_standby_waits_for_a_run_that_has_not_begun(tmp_path):
  start = start_of(tmp_path)
  with standbys(start) as (one,):
    assert "has not begun" in said_by(one.address)
    assert not start.run_dir.exists()

    with primary(start) as run:
      wait_for(lambda: f"stands by for {run.address}" in said_by(one.address))
      run.request_stop()
      assert run.wait(60.0).exit_code == 0
    one.join(60.0)
  assert isinstance(one.error, standby.StoodDown), one.error


def test_a_syncer_that_restores_says_so_and_is_not_serving(tmp_path):
  with primary(start_of(tmp_path)):
    pass
  files = HangingFiles()
  start = start_of(tmp_path, files)
  files.hang()
  with socket.create_server(("127.0.0.1", 0)) as taken:
    address = f"127.0.0.1:{taken.getsockname()[1]}"
  done = threading.Event()

  def restore():
    with serving.serving(start, address, restore=True):
      done.wait(60.0)

  making = threading.Thread(target=restore, daemon=True)
  making.start()
  wait_for(lambda: files.num_waiting)
  client = Client(address, learner=ONLOOKER)
  with pytest.raises(ServiceError, match="restores the run in") as caught:
    client.get_run()
  assert caught.value.code == "UNAVAILABLE"
  assert health(address) == "NOT_SERVING"

  files.go_on()
  wait_for(lambda: health(address) == "SERVING")
  assert client.get_run().epoch == 2
  client.close()
  done.set()
  making.join(60.0)


@pytest.mark.parametrize(
  ("changes", "told"),
  [
    ({"run__standby_lease_s": 0.0}, r"--standby with run\.standby_lease_s=0"),
    ({"run__accept_loss": True}, r"--standby with run\.accept_loss=True"),
  ],
)
def test_a_standby_that_contradicts_itself_is_refused(tmp_path, changes, told):
  with (
    pytest.raises(exits.BadUsage, match=told),
    standby.standing_by(
      start_of(tmp_path, **changes), "127.0.0.1:0", lambda: None
    ),
  ):
    pass


def test_a_standby_waits_for_what_cannot_be_read_and_says_it_once(
  tmp_path, caplog
):
  start = start_of(tmp_path)
  start.run_dir.write_text("no directory")
  looks = itertools.count()

  with (
    caplog.at_level("INFO"),
    pytest.raises(standby.StoodDown),
    standby.standing_by(
      start, "127.0.0.1:0", lambda: "enough" if next(looks) > 6 else None
    ),
  ):
    pass

  said = [x for x in caplog.messages if x.startswith("stands by for the run")]
  assert len(said) == 1


@pytest.mark.parametrize("record", ["{}", "[]"])
def test_a_record_that_is_none_is_refused(tmp_path, record):
  start = start_of(tmp_path)
  start.run_dir.mkdir()
  (start.run_dir / "config.json").write_text(record)

  with (
    pytest.raises(exits.BadUsage, match="damaged, or no run's"),
    standby.standing_by(start, "127.0.0.1:0", lambda: None),
  ):
    pass


def test_a_standby_that_could_not_take_over_says_so_at_once(tmp_path):
  with primary(start_of(tmp_path)) as run:
    with (
      pytest.raises(exits.BadUsage, match=r"sync\.cycle_steps is 8"),
      standby.standing_by(
        start_of(tmp_path, cycle_steps=8), "127.0.0.1:0", lambda: None
      ),
    ):
      pass
    assert run.status().epoch == 1


def test_a_start_without_a_lease_is_not_taken_over_from(tmp_path):
  with primary(start_of(tmp_path)):
    pass
  start = start_of(tmp_path, run__standby_lease_s=0.0)
  assert (start.run_dir / "heartbeat.json").exists()
  with serving.serving(start, "127.0.0.1:0", restore=True):
    watch = Watch(
      start.run_dir, Journal(start.run_dir / "journal", OsFiles()), LEASE_S
    )
    watch.look()
    assert "renews no heartbeat" in watch.sentence()
    assert not watch.is_due()


# --- who holds the directory -------------------------------------------------------


@pytest.mark.parametrize("tx", [TX, optax.adam(0.1)], ids=["sgd", "adam"])
def test_what_is_written_after_the_takeover_counts_for_nothing(tmp_path, tx):
  # A syncer that is stopped before a write, and goes on after the takeover.
  old = DurableRun(tmp_path / "run", tx=tx)
  old.run_to(2)
  new = Store(str(tmp_path / "run"), restore=True, takes_over=2)
  found = restoring.versions_of(new.restore(LAYOUT, tx))
  new.begin("run-1", sum(found))

  with pytest.raises(Superseded, match="epoch 2"):
    old.run_to(3)
  new.close()
  old.store.close()

  again = Store(str(tmp_path / "run"), restore=True)
  assert restoring.versions_of(again.restore(LAYOUT, tx)) == found
  again.close()


def test_a_start_that_had_the_lock_before_the_takeover_is_refused(tmp_path):
  DurableRun(tmp_path / "run").store.close()
  slow = Store(str(tmp_path / "run"), restore=True)
  new = Store(str(tmp_path / "run"), restore=True, takes_over=2)

  with pytest.raises(InUse, match="a standby has just taken over"):
    slow.begin("run-1")
  with pytest.raises(InUse, match="--standby"):
    Store(str(tmp_path / "run"), restore=True)

  slow.close()
  new.close()


def test_whoever_comes_second_does_not_take_over(tmp_path):
  DurableRun(tmp_path / "run").store.close()
  first = Store(str(tmp_path / "run"), restore=True, takes_over=2)
  with pytest.raises(TooLate, match="epoch 2"):
    Store(str(tmp_path / "run"), restore=True, takes_over=2)
  with pytest.raises(InUse, match="locked"):
    Store(str(tmp_path / "run"), restore=True)
  first.close()


def test_a_checkpoint_that_a_later_epoch_went_on_before_is_set_aside(tmp_path):
  # With durability="snapshot": a stopped syncer ends its save after the takeover.
  old = DurableRun(tmp_path / "run")
  new = Store(str(tmp_path / "run"), restore=True, takes_over=2)
  new.restore(LAYOUT, TX)
  new.begin("run-1", 0)
  old.store.checkpoints.save(
    6,
    trees=restoring.trees_of(old.tensors),
    records={
      "state": machine.save(old.state),
      "spec": {"run_id": "run-1", "layout_digest": LAYOUT.digest()},
    },
  )
  old.store.close()
  new.close()

  again = Store(str(tmp_path / "run"), restore=True)
  again.restore(LAYOUT, TX)
  again.begin("run-1", 0)
  assert again.checkpoints.steps() == [0]
  again.close()
