"""Real processes, small ones: start, kill on plan, restart by policy, stop."""

import os
import signal
import sys
import time

import pytest

from ddiloco_jax.launch.children import Child
from ddiloco_jax.launch.failures import Progress, parse_kill
from ddiloco_jax.launch.plan import ADDRESS, Process
from ddiloco_jax.launch.run import LaunchConfig, Run

SERVE = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path(sys.argv[1], "address").write_text("127.0.0.1:4711")
time.sleep({seconds})
sys.exit({code})
"""
WAIT = "import time; time.sleep(60)"


def process(name: str, code: str, *words: str, again: str = "") -> Process:
  argv = (sys.executable, "-c", code, *words)
  second = (sys.executable, "-c", again or code, *words)
  return Process(name=name, argv=argv, again=second)


class Driven:
  """A run, its words, and a way to drive it until something is so."""

  def __init__(self, tmp_path, *learners, kills=(), seconds=60, code=0, **cfg):
    serve = SERVE.format(seconds=seconds, code=code)
    self.said: list[str] = []
    self.progress = Progress(0.0, 0, 100)
    self.run = Run(
      [process("syncer", serve, str(tmp_path)), *learners],
      tmp_path,
      LaunchConfig(
        **{"first_pause_s": 0.01, "finish_grace_s": 0.2, **cfg}
        | {"alone_grace_s": 0.2}
      ),
      kills=[parse_kill(k, len(learners)) for k in kills],
      say=self.said.append,
    )

  def start(self):
    assert self.run.start_syncer(lambda: False)
    self.run.start_learners()
    return self

  def until(self, condition, timeout_s=20.0):
    began = time.monotonic()
    while not condition():
      over = self.run.advance(
        self.progress._replace(elapsed_s=time.monotonic() - began)
      )
      assert time.monotonic() - began < timeout_s, self.said
      if over:
        break
      time.sleep(0.01)
    return self

  def to_the_end(self):
    return self.until(lambda: False)

  def text(self):
    return "\n".join(self.said)


@pytest.fixture
def driven(tmp_path):
  runs = []

  def make(*args, **kwargs):
    runs.append(Driven(tmp_path, *args, **kwargs))
    return runs[-1]

  yield make
  for each in runs:
    each.run.stop(lambda: True)


def test_a_run_that_ends_well_has_exit_code_0(driven):
  d = driven(process("learner-0", "pass"), seconds=0.3).start().to_the_end()

  assert d.run.exit_code() == 0
  assert not d.run.failures


def test_a_learner_is_told_where_the_syncer_serves(driven, tmp_path):
  code = "import sys; print(sys.argv[1])"

  driven(process("learner-0", code, f"--syncer={ADDRESS}")).start().to_the_end()

  log = (tmp_path / "logs" / "learner-0.log").read_text()
  assert "--syncer=127.0.0.1:4711" in log


def test_a_failed_learner_is_named_with_the_end_of_its_log(driven):
  bad = process("learner-1", "print('it broke'); raise SystemExit(7)")

  d = driven(process("learner-0", WAIT), bad).start()
  d.until(lambda: d.run.failures)

  assert d.run.children["learner-0"].is_running  # The others train on.
  assert d.run.exit_code() == 7
  assert "learner-1 exited with code 7" in d.text()
  assert "| it broke" in d.text()


def test_a_planned_kill_is_no_failure_and_returns_on_time(driven):
  again = f"print('back', flush=True); {WAIT}"
  back = process("learner-0", WAIT, again=again)
  d = driven(back, kills=["0@33%:66%"]).start()
  child = d.run.children["learner-0"]

  d.progress = Progress(0.0, 33, 100)
  d.until(lambda: child.exit_code == -signal.SIGKILL)
  d.progress = Progress(0.0, 66, 100)
  d.until(lambda: "back" in child.last_lines())

  assert child.num_starts == 2
  assert d.run.exit_code() == 0


def test_a_killed_syncer_comes_back_on_the_address_it_had(driven, tmp_path):
  d = driven(process("learner-0", WAIT), kills=["syncer@0:0.3"]).start()
  syncer = d.run.syncer

  d.until(lambda: syncer.num_starts == 2 and syncer.is_running)

  assert d.run.children["learner-0"].num_starts == 1
  assert d.run.exit_code() == 0


def test_always_restarts_what_fails_until_it_stays(driven):
  flaky = process("learner-0", "raise SystemExit(1)", again=WAIT)

  d = driven(flaky, restart="always").start()
  d.until(lambda: d.run.children["learner-0"].num_starts == 2)

  assert not d.run.failures
  assert "starts again" in d.text()


@pytest.mark.parametrize("code", [2, 3])
def test_what_would_fail_again_is_not_restarted(driven, code):
  bad = process("learner-0", f"raise SystemExit({code})")

  d = driven(bad, restart="always").start().to_the_end()

  assert d.run.children["learner-0"].num_starts == 1
  assert d.run.exit_code() == code


def test_a_process_that_dies_at_once_is_given_up_in_the_end(driven):
  bad = process("learner-0", "raise SystemExit(1)")

  d = driven(bad, restart="always", max_quick_failures=2).start().to_the_end()

  assert d.run.children["learner-0"].num_starts == 3
  assert d.run.exit_code() == 1


def test_a_syncer_without_learners_is_stopped(driven):
  d = driven(process("learner-0", "raise SystemExit(2)")).start().to_the_end()

  assert "no learner is left" in d.text()
  assert d.run.exit_code() == 2


def test_a_syncer_that_fails_ends_the_run_with_its_code(driven):
  d = driven(process("learner-0", WAIT), seconds=0.2, code=4)

  d.start().to_the_end()

  assert d.run.exit_code() == 4
  assert not d.run.children["learner-0"].is_running


def test_a_syncer_that_cannot_serve_is_told_at_once(tmp_path):
  said = []
  broken = process("syncer", "print('port in use'); raise SystemExit(6)")
  run = Run([broken], tmp_path, LaunchConfig(), say=said.append)

  assert not run.start_syncer(lambda: False)

  assert run.exit_code() == 6
  assert "port in use" in "\n".join(said)


def test_an_address_of_an_earlier_run_is_not_believed(tmp_path):
  (tmp_path / "address").write_text("127.0.0.1:1")
  broken = process("syncer", "raise SystemExit(6)")
  run = Run([broken], tmp_path, LaunchConfig(), say=lambda _: None)

  assert not run.start_syncer(lambda: False)


def test_stop_ends_all_in_order(driven):
  orderly = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
    "print('up', flush=True)\ntime.sleep(60)"
  )
  d = driven(process("learner-0", orderly)).start()
  child = d.run.children["learner-0"]
  d.until(lambda: "up" in child.last_lines())

  d.run.stop()

  assert child.exit_code == 0
  assert "saved" in child.last_lines()
  assert d.run.syncer.exit_code == 0
  assert d.run.exit_code() == 0


def test_stop_ends_what_does_not_listen_and_says_so(driven):
  deaf = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('up', flush=True)\ntime.sleep(60)"
  )
  d = driven(process("learner-0", deaf), stop_grace_s=0.2).start()
  child = d.run.children["learner-0"]
  d.until(lambda: "up" in child.last_lines())

  d.run.stop()

  assert child.exit_code == -signal.SIGKILL
  assert "did not end on SIGTERM" in d.text()
  assert d.run.exit_code() == 1


def test_a_kill_takes_what_the_process_started_with_it(driven, tmp_path):
  parent = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c',"
    " 'import time; time.sleep(60)'])\n"
    "print('child', child.pid, flush=True)\ntime.sleep(60)"
  )
  d = driven(process("learner-0", parent), kills=["0@1%"]).start()
  child = d.run.children["learner-0"]
  d.until(lambda: "child" in child.last_lines())
  pid = int(child.last_lines().split()[-1])

  d.progress = Progress(0.0, 1, 100)
  d.until(lambda: child.exit_code is not None)

  assert is_gone(pid)


def is_gone(pid: int) -> bool:
  """Dead, or a zombie that waits for whoever reaps orphans here."""
  deadline = time.monotonic() + 5.0
  while time.monotonic() < deadline:
    try:
      with open(f"/proc/{pid}/stat") as stat:
        if stat.read().rpartition(")")[2].split()[0] == "Z":
          return True
    except FileNotFoundError:
      return True
    time.sleep(0.01)
  return False


def test_an_unknown_policy_is_an_error():
  with pytest.raises(ValueError, match="never, always"):
    LaunchConfig(restart="sometimes")


def test_a_child_that_trains_yields_to_one_that_starts(tmp_path):
  process = Process(name="a", argv=("sleep", "60"), again=("sleep", "60"))
  child = Child(process, tmp_path)
  own = os.getpriority(os.PRIO_PROCESS, 0)  # Such as 5, under `nice -n 5`.
  child.start()
  try:
    assert child.pid
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == own

    child.give_way()

    yielding = os.getpriority(os.PRIO_PROCESS, child.pid)
    assert yielding > own or yielding == own == 19  # The system's last.
    child.kill()
    child.start()
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == own
  finally:
    child.kill()
