"""Real processes: a syncer that is stopped in a commit, and one that stands by."""

import pathlib
import signal

import numpy as np
import pytest

from ddiloco_jax.launch import exits
from ddiloco_jax.protocol import events, tape
from ddiloco_jax.wire.options import WireConfig
from tests.support.books import check_merged
from tests.support.over_grpc import THETA, LoopLearner, learners, paced
from tests.support.processes import (
  SYNCER,
  address_of,
  ending,
  module,
  overrides,
)
from tests.support.served import wait_for

SMALL = "--config=tests/support/small.py"
WIRE = WireConfig(keepalive_s=0.5, keepalive_timeout_s=1.0)
SETTINGS = overrides(
  sync__num_fragments=2,
  fragments__num_fragments=2,
  sync__cycle_steps=4,
  sync__lease_s=30.0,
  wire__up_format="float32",
  run__standby_lease_s=6.0,
)


@pytest.mark.slow  # Its fast form is in test_standby.py, with a disk that hangs.
@pytest.mark.parametrize("point", ["before", "after"])
def test_a_syncer_stopped_in_a_commit_is_taken_over_from(tmp_path, point):
  run_dir = tmp_path / "run"
  np.savez(tmp_path / "theta.npz", **THETA)
  with ending() as start:
    old = start(
      module(
        "tests.support.stops_itself", str(run_dir), point, SMALL, *SETTINGS
      ),
      tmp_path / "old.log",
    )
    old_address = address_of(run_dir, old)
    one = start(
      module(
        SYNCER,
        SMALL,
        "--standby",
        "--address=127.0.0.1:0",
        f"--run_dir={run_dir}",
        f"--layout_arrays={tmp_path / 'theta.npz'}",
        *SETTINGS,
      ),
      tmp_path / "standby.log",
    )
    one.wait_for(lambda: "syncer stands by at" in one.said())
    (line,) = [x for x in one.said().splitlines() if "stands by at" in x]
    addresses = (old_address, line.split()[-1])
    pair = [
      LoopLearner(addresses, name, paced(0.03), wire=WIRE)
      for name in ("ada", "bob")
    ]
    with learners(*pair):
      wait_for(lambda: all(len(each.adopted) >= 12 for each in pair))
      (run_dir / "stop_now").touch()
      wait_for(lambda: is_stopped(old.pid))
      steps = [len(each.steps) for each in pair]
      one.wait_for(lambda: "syncer serves at" in one.said())
      wait_for(lambda: all(e.link.welcome.epoch == 2 for e in pair))
      # They trained while nobody was there, and merge again.
      assert all(len(e.steps) > n + 20 for e, n in zip(pair, steps))
      taken = read_merges(run_dir / "tape.1.jsonl")
      old.signal(signal.SIGCONT)
      code = old.wait(60.0)
      count = [len(each.adopted) for each in pair]
      wait_for(
        lambda: all(len(e.adopted) >= n + 8 for e, n in zip(pair, count))
      )
      one.signal(signal.SIGTERM)
      assert one.wait(60.0) == exits.OK, one.said()
      for each in pair:
        each.end()

  assert code == exits.SUPERSEDED, old.said()
  assert "publishes nothing more" in old.said()
  assert read_merges(run_dir / "tape.1.jsonl") == taken
  tapes = [run_dir / "tape.1.jsonl", run_dir / "tape.jsonl"]
  assert not tape.replay(tapes[0]).faults
  last = tape.replay(tapes[1])
  assert (last.faults, last.closed) == ((), True)
  start_n = last.state.starts[-1]
  # What was on disk by then is part of the run, though not on its tape.
  assert sum(start_n) == len(taken) + (point == "after")
  for p in range(2):
    old_n = [v.n for q, v in taken if q == p]
    new_n = [v.n for q, v in read_merges(tapes[1]) if q == p]
    assert old_n == list(range(1, len(old_n) + 1))
    assert new_n == list(range(start_n[p] + 1, start_n[p] + 1 + len(new_n)))
    told = [
      v.n for e in pair for q, v, *_ in e.adopted if (q, v.epoch) == (p, 1)
    ]
    assert max(told) <= start_n[p]
  check_merged(tapes, last.state)


def test_standby_and_restore_contradict_each_other(tmp_path):
  with ending() as start:
    one = start(
      module(SYNCER, SMALL, "--standby", "--restore", f"--run_dir={tmp_path}"),
      tmp_path / "log",
    )
    assert one.wait(60.0) == exits.BAD_USAGE
  assert "--standby and --restore" in one.said()


def is_stopped(pid: int) -> bool:
  text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  return text.rpartition(")")[2].split()[0] == "T"


def read_merges(path: pathlib.Path) -> list[tuple[int, events.Version]]:
  found = []
  for line in tape.Reader(path).lines():
    if isinstance(line.event, events.Merged):
      found.append((line.event.fragment, line.event.version))
  return found
