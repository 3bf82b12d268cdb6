"""The end of `cli.local`, after its processes: evaluated, summed up, stopped."""

import contextlib
import json
import signal
import sys

import pytest

from ddiloco_jax import config
from ddiloco_jax.launch import exits, held_out, syncing
from tests.support import small
from tests.support.over_grpc import LoopLearner, learners, paced, served_run
from tests.support.processes import ending
from tests.support.served import wait_for

SCRIPT = """
import pathlib, sys
from rich.console import Console
from ddiloco_jax.launch import local
requests = local.StopRequests()
requests.catch()
screen = local.Screen(Console(soft_wrap=True))
sys.exit(local.conclude(pathlib.Path(sys.argv[1]), requests, screen))
"""
LOSSES = ("loss_start", "loss_end", "bigram_entropy")


@contextlib.contextmanager
def trained(directory, snapshot=None):
  """A run of the small model, that a learner trains."""
  editable = small.get_config()
  editable.sync.num_syncer_steps = 12
  cfg = config.freeze(editable)
  theta = syncing.init_params(cfg)
  shapes = {path: array.shape for path, array in theta.items()}
  with (
    served_run(cfg, directory, theta=theta, snapshot=snapshot) as run,
    learners(LoopLearner(run.address, "a", paced(0.03, shapes=shapes))),
  ):
    yield run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
  """Of a run that has ended."""
  directory = tmp_path_factory.mktemp("ended") / "run"
  with trained(directory) as run:
    assert run.wait(60.0).exit_code == 0
  return directory


@pytest.fixture
def conclude(run_dir, tmp_path):
  """Starts the conclusion of that run, until it evaluates."""
  for name in ("summary.json", "report.html"):
    (run_dir / name).unlink(missing_ok=True)
  with ending() as start:

    def until_it_evaluates():
      process = start(
        [sys.executable, "-c", SCRIPT, str(run_dir)], tmp_path / "log"
      )
      process.wait_for(lambda: "evaluating on held-out" in process.said())
      return process

    yield until_it_evaluates


def test_a_run_that_has_ended_is_evaluated_and_summed_up(conclude, run_dir):
  process = conclude()

  assert process.wait() == exits.OK, process.said()
  told = json.loads((run_dir / "summary.json").read_text())
  assert all(told[name] is not None for name in LOSSES)
  assert process.said().splitlines()[-1] == str(run_dir / "summary.json")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_its_evaluation_it_sums_up_without(
  conclude, run_dir, number
):
  process = conclude()
  process.signal(number)

  assert process.wait(60.0) == exits.OK, process.said()
  said = process.said()
  assert "the evaluation was stopped" in said
  assert all(name in said for name in LOSSES)
  assert "Traceback" not in said
  told = json.loads((run_dir / "summary.json").read_text())
  assert [told[name] for name in LOSSES] == [None] * 3
  assert told["tokens_merged"] > 0
  assert (run_dir / "report.html").exists()


def test_stopped_once_more_it_sums_nothing_up(conclude, run_dir):
  process = conclude()
  process.signal(signal.SIGINT)
  process.wait_for(lambda: "the evaluation was stopped" in process.said())
  process.signal(signal.SIGINT)

  assert process.wait(60.0) == exits.FAILED, process.said()
  assert "stopped before" in process.said()
  assert "Traceback" not in process.said()
  assert not (run_dir / "summary.json").exists()


def test_a_run_from_a_snapshot_has_no_loss_at_its_start(tmp_path):
  with trained(tmp_path / "first") as run:
    wait_for(lambda: run.status().num_training == 1)
    run.syncer.take_snapshot()
    run.request_stop()
    run.wait()
  latest = tmp_path / "first" / "snapshots" / "latest"
  with trained(tmp_path / "second", snapshot=latest) as run:
    run.request_stop()
    run.wait()

  losses = held_out.evaluate_run(tmp_path / "second")

  assert losses["loss_start"] is None
  assert losses["loss_end"]
