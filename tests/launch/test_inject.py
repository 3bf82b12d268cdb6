"""Faults done to real processes, small ones, and taken back."""

import contextlib
import json
import pathlib
import signal
import socket
import sys
import time

import pytest

from ddiloco_jax.chaos.plan import SYNCER, Fault, Kind
from ddiloco_jax.launch import inject, jumping
from ddiloco_jax.launch.children import Child
from ddiloco_jax.launch.failures import Progress
from ddiloco_jax.launch.plan import Process
from ddiloco_jax.launch.relay import Relay
from ddiloco_jax.launch.run import LaunchConfig, Run

# Says at every beat what it sees: its clock, and whether it can write. It says
# so in memory that is shared, which no limit on files hinders.
BEATS = """
import mmap, os, sys, time
told = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 40)
grows = open(sys.argv[2], "ab", 0)
for n in range(10_000):
  try:
    error = 0 * grows.write(b"x")
  except OSError as why:
    error = why.errno
  told[:38] = f"{n:8d} {error:8d} {time.time():20.3f}".encode()
  time.sleep(0.02)
"""
ROOT = pathlib.Path(__file__).parents[2]


def wait_for(condition, timeout_s=30.0):
  deadline = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


class Beating:
  """A child that beats, behind a relay, and an injector of its faults."""

  def __init__(self, place, *faults):
    self.place = place
    self._told = place / "told"
    self._told.write_bytes(b" " * 40)
    (place / "beats.py").write_text(BEATS)
    argv = (
      *(sys.executable, "-m", "ddiloco_jax.launch.jumping"),
      *(str(place / "jumps"), "beats", str(self._told), str(place / "grows")),
    )
    process = Process(
      name="learner-0",
      argv=argv,
      again=argv,
      env={"PYTHONPATH": f"{ROOT}:{place}"},
    )
    self.child = Child(process, place / "logs")
    self.relay = Relay()
    self.said = []
    self.record = inject.Record(place)
    self.injector = inject.Injector(
      faults,
      {"learner-0": self.child},
      [self.relay],
      place / "jumps",
      self.record,
      self.said.append,
    )

  def start(self):
    self.child.start()
    wait_for(lambda: self.beat()[0] > 0)
    return self

  def beat(self):
    """(number, errno of its last write, its wall clock)."""
    words = self._told.read_text().split()
    return (
      (int(words[0]), int(words[1]), float(words[2])) if words else (0,) * 3
    )

  def next_beat(self):
    """One that begins after now."""
    number = self.beat()[0]
    wait_for(lambda: self.beat()[0] > number + 1)
    return self.beat()

  def lines(self, what):
    text = (self.place / "faults.jsonl").read_text()
    return [x for x in map(json.loads, text.splitlines()) if x["what"] == what]

  def close(self):
    self.child.kill()
    self.relay.close()
    self.record.close()


@pytest.fixture
def beating(tmp_path):
  with contextlib.ExitStack() as stack:

    def make(*faults):
      made = Beating(tmp_path, *faults)
      stack.callback(made.close)
      return made.start()

    yield make


def fault(kind, **values):
  return Fault(at_s=1.0, kind=kind, target=0, lasts_s=4.0, **values)


def state_of(child):
  """As the system sees it: T is stopped."""
  stat = pathlib.Path(f"/proc/{child.pid}/stat").read_text()
  return stat.rpartition(")")[2].split()[0]


def test_a_stopped_process_stands_still_and_goes_on(beating):
  learner = beating(fault(Kind.STOP))
  learner.injector.advance(0.9)
  learner.next_beat()
  assert not learner.injector.active

  learner.injector.advance(1.1)
  wait_for(lambda: state_of(learner.child) == "T")
  number = learner.beat()[0]
  learner.injector.advance(4.9)
  assert state_of(learner.child) == "T"
  assert learner.beat()[0] == number
  learner.injector.advance(5.0)

  assert learner.next_beat()[0] > number
  assert learner.child.is_running
  (begun,), (over,) = learner.lines("fault"), learner.lines("fault_over")
  assert (begun["at_s"], begun["done"], over["at_s"]) == (1.1, True, 5.0)
  assert begun["fault"]["kind"] == "stop"
  assert "stopped for 4.0 s" in learner.said[0]


def test_a_full_disk_fails_writes_and_room_comes_back(beating):
  learner = beating(fault(Kind.DISK))
  assert learner.next_beat()[1] == 0

  learner.injector.advance(1.0)
  while_full = learner.next_beat()[1]
  size = (learner.place / "grows").stat().st_size
  learner.next_beat()
  assert (learner.place / "grows").stat().st_size == size
  learner.injector.advance(5.0)

  assert while_full == 27  # EFBIG
  assert learner.next_beat()[1] == 0
  assert (learner.place / "grows").stat().st_size > size


@pytest.mark.parametrize("jump_s", [3_600.0, -86_400.0])
def test_a_clock_jumps_and_jumps_back(beating, jump_s):
  learner = beating(fault(Kind.CLOCK, jump_s=jump_s))
  assert learner.next_beat()[2] == pytest.approx(time.time(), abs=5.0)

  learner.injector.advance(1.0)
  jumped = learner.next_beat()[2] - time.time()
  learner.injector.advance(5.0)

  assert jumped == pytest.approx(jump_s, abs=5.0)
  assert learner.next_beat()[2] == pytest.approx(time.time(), abs=5.0)


def test_a_process_that_is_not_ready_has_no_jump(tmp_path):
  child = Child(
    Process(
      name="learner-0",
      argv=(sys.executable, "-c", "import time; time.sleep(60)"),
      again=(),
    ),
    tmp_path,
  )
  child.start()

  jumping.jump(child.pid, tmp_path / "jumps", 60.0)  # Else SIGUSR1 ends it.

  time.sleep(0.1)
  assert child.is_running
  child.kill()


@contextlib.contextmanager
def echoing(learner):
  """A connection of the learner's, and the syncer's end of it."""
  with socket.create_server(("127.0.0.1", 0)) as server:
    learner.relay.redirect(f"127.0.0.1:{server.getsockname()[1]}")
    host, port = learner.relay.address.split(":")
    with socket.create_connection((host, int(port)), 20.0) as near:
      far, _ = server.accept()
      with far:
        far.settimeout(20.0)
        near.sendall(b"a")
        assert far.recv(1) == b"a"
        yield near, far


def is_silent(end):
  end.settimeout(0.3)
  try:
    return not end.recv(1) and False
  except TimeoutError:
    return True
  finally:
    end.settimeout(20.0)


def test_in_a_partition_nothing_passes_until_it_is_over(beating):
  learner = beating(fault(Kind.PARTITION))
  with echoing(learner) as (near, far):
    learner.injector.advance(1.0)
    near.sendall(b"b")
    far.sendall(b"c")

    assert is_silent(far)
    assert is_silent(near)
    learner.injector.advance(5.0)
    assert (far.recv(1), near.recv(1)) == (b"b", b"c")
  assert "partitioned" in learner.said[0]


def test_a_half_open_one_ends_at_the_syncer_only(beating):
  learner = beating(fault(Kind.PARTITION, half_open=True))
  with echoing(learner) as (near, far):
    learner.injector.advance(1.0)

    with contextlib.suppress(ConnectionResetError):
      assert far.recv(1) == b""
    assert is_silent(near)
  assert "half-open" in learner.said[0]


def test_a_slow_link_is_slow_until_it_is_over(beating):
  learner = beating(fault(Kind.SLOW, latency_s=0.4, bytes_per_s=10**6))
  with echoing(learner) as (near, far):

    def takes_s():
      start = time.monotonic()
      near.sendall(b"b")
      assert far.recv(1) == b"b"
      return time.monotonic() - start

    learner.injector.advance(1.0)
    slow_s = takes_s()
    learner.injector.advance(5.0)

    assert slow_s >= 0.4
    assert min(takes_s() for _ in range(5)) < 0.4


def test_healing_ends_what_is_under_way_and_begins_nothing(beating):
  later = Fault(at_s=2.0, kind=Kind.DISK, target=0, lasts_s=4.0)
  learner = beating(fault(Kind.STOP), later)
  learner.injector.advance(1.0)

  learner.injector.heal(1.5)
  learner.injector.advance(9.0)

  assert learner.next_beat()[1] == 0
  assert not learner.injector.active
  assert len(learner.lines("fault")) == 1
  assert learner.lines("fault_over")[0]["at_s"] == 1.5


def test_a_fault_of_a_process_that_is_gone_is_written_down_as_not_done(beating):
  learner = beating(fault(Kind.STOP))
  learner.child.signal(signal.SIGTERM)
  wait_for(lambda: not learner.child.is_running)

  learner.injector.advance(1.0)
  learner.injector.advance(1.1)

  (begun,) = learner.lines("fault")
  assert begun["done"] is False
  assert not learner.injector.active
  (start,), (end,) = learner.lines("start"), learner.lines("end")
  assert (start["life"], end["code"], end["killed"]) == (1, -15, False)


SERVES = """
import pathlib, sys, time
pathlib.Path(sys.argv[1], "address").write_text("127.0.0.1:4711")
time.sleep(60)
"""


def test_kills_are_the_runs_own_and_starts_and_ends_are_seen(tmp_path):
  kills = [
    Fault(at_s=1.0, kind=Kind.KILL, target=0, lasts_s=2.0),
    Fault(at_s=4.0, kind=Kind.KILL, target=SYNCER, lasts_s=2.0),
  ]
  processes = []
  for name in ("syncer", "learner-0", "learner-1"):
    code = SERVES if name == "syncer" else "import time; time.sleep(60)"
    argv = (sys.executable, "-S", "-c", code, str(tmp_path))
    processes.append(Process(name=name, argv=argv, again=argv))
  run = Run(
    processes,
    tmp_path,
    LaunchConfig(restart="always"),
    inject.kills_of([*kills, fault(Kind.STOP)]),
    lambda text: None,
  )
  record = inject.Record(tmp_path)
  injector = inject.Injector(
    kills, run.children, [], tmp_path, record, lambda text: None
  )
  try:
    assert run.start_syncer(lambda: False)
    run.start_learners()
    first = run.children["learner-0"].pid
    for now_s in (0.0, 0.5, 1.0, 1.1, 2.0, 3.0, 3.1, 4.0, 4.1, 6.0, 6.1):
      run.advance(Progress(now_s))
      injector.advance(now_s)
    second = run.children["learner-0"].pid
  finally:
    for child in run.children.values():
      child.kill()
    record.close()

  text = (tmp_path / "faults.jsonl").read_text().splitlines()
  lines = [x for x in map(json.loads, text) if x["what"] != "fault"]
  assert first != second
  assert [
    (x["what"], x["process"], x["life"], x["at_s"])
    for x in lines
    if x["at_s"] > 0.0
  ] == [
    ("end", "learner-0", 1, 1.0),
    ("start", "learner-0", 2, 3.0),
    ("end", "syncer", 1, 4.0),
    ("start", "syncer", 2, 6.0),
  ]
  assert [(x["code"], x["killed"]) for x in lines if x["what"] == "end"] == [
    (-9, True)
  ] * 2
