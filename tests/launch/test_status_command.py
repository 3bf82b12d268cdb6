"""`cli.status` against a real server, and against none."""

import contextlib
import json
import math
import socket
import subprocess
import sys

import pytest

from ddiloco_jax.algorithm import fragments
from ddiloco_jax.cli import status as command
from ddiloco_jax.launch import exits
from ddiloco_jax.syncer import server
from ddiloco_jax.wire import options, port
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb


class Standing:
  """A run that only stands, one t further at every call."""

  max_learners = 4

  def __init__(self, end: int = 0):
    self.t = 0
    self.end = end

  def get_run(self) -> port.RunSpec:
    shapes = {"w": ((2,), "float32")}
    return port.RunSpec(
      run_id="r",
      epoch=1,
      layout=fragments.make_layout(shapes, "balanced", 1),
      cycle_steps=4,
      max_open_rounds=1,
      quorum=2,
      alpha=0.0,
      up_format="float32",
      down_format="float32",
      chunk_bytes=1024,
      lease_s=15.0,
    )

  def status(self) -> pb.Status:
    self.t += 1
    return pb.Status(
      t=self.t,
      phase="finished" if 0 < self.end <= self.t else "waiting",
      waiting_for="quorum 2: learner 0 is here, one more is missing",
      quorum_s=math.nan,
    )


@contextlib.contextmanager
def serving(standing):
  served = server.Server("127.0.0.1:0", options.WireConfig())
  served.serve(standing)
  try:
    yield served.address
  finally:
    served.stop(0.0)


def free_address() -> str:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{probe.getsockname()[1]}"


def test_it_says_in_one_sentence_what_the_run_waits_for(capsys):
  with serving(Standing()) as address:
    code = command.main([address])

  assert code == exits.OK
  out = capsys.readouterr().out
  assert "now: quorum 2: learner 0 is here, one more is missing" in out


def test_json_is_one_object_a_line(capsys):
  with serving(Standing()) as address:
    command.main([address, "--json"])

  (line,) = capsys.readouterr().out.splitlines()
  values = json.loads(line, parse_constant=pytest.fail)
  assert values["phase"] == "waiting"
  assert values["quorum_s"] is None  # NaN, which JSON has no word for.


def test_watch_ends_with_the_run(capsys, monkeypatch):
  monkeypatch.setattr(command.time, "sleep", lambda s: None)

  with serving(Standing(end=3)) as address:
    code = command.main([address, "--watch", "--json"])

  lines = capsys.readouterr().out.splitlines()
  assert code == exits.OK
  assert [json.loads(line)["t"] for line in lines] == [1, 2, 3]


def test_no_syncer_is_a_clear_error_with_its_own_code(capsys):
  address = free_address()

  code = command.main([address, "--timeout_s=1"])

  assert code == exits.NO_SYNCER
  assert f"No syncer serves a run at {address}" in capsys.readouterr().err


@pytest.mark.parametrize(
  "address", ["localhost", "8470", "host:port", ":1", "127.0.0.1:99999"]
)
def test_what_is_no_address_is_bad_usage(address, capsys):
  with pytest.raises(SystemExit) as ended:
    command.main([address])

  assert ended.value.code == exits.BAD_USAGE
  assert "HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["status", "local"])
def test_help_suffices_and_does_not_wait_for_jax(name):
  code = (
    "import runpy, sys\n"
    f"sys.argv = ['{name}', '--help']\n"
    "try:\n"
    f"  runpy.run_module('ddiloco_jax.cli.{name}', run_name='__main__')\n"
    "except SystemExit as end:\n"
    "  assert end.code == 0, end.code\n"
    "assert 'jax' not in sys.modules\n"
  )

  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=False
  )

  assert done.returncode == 0, done.stderr
  assert "exit codes" in done.stdout
  assert "usage:" in done.stdout
