"""A run of real processes: a syncer, and learners without JAX."""

import contextlib
import json
import pathlib
import subprocess
import sys

import pytest

from ddiloco_jax.launch import exits, local
from ddiloco_jax.launch.failures import parse_kill
from ddiloco_jax.launch.plan import ADDRESS, Process, RunPlan, syncer_process
from ddiloco_jax.launch.run import LaunchConfig, Run
from ddiloco_jax.protocol import tape
from ddiloco_jax.report import chronicle, history, report

ROOT = pathlib.Path(__file__).parents[2]
CUSTOM = ROOT / "docs" / "examples" / "custom_learner.py"
MESSAGES = ROOT / "ddiloco_jax" / "wire" / "pb"  # As the docs have them made.


class SilentScreen(local.Screen):
  """Keeps what is said, shows nothing."""

  def __init__(self):
    self.said: list[str] = []
    self.num_shown = 0

  def open(self):
    return contextlib.nullcontext()

  def say(self, text):
    self.said.append(text)

  def show(self, status, processes):
    self.num_shown += status is not None


def make_syncer(run_dir: pathlib.Path, *overrides: str) -> Process:
  settings = {
    "sync.num_fragments": 2,
    "sync.cycle_steps": 4,
    "sync.num_syncer_steps": 160,
    "sync.lease_s": 3.0,
    "run.max_solo_s": 60.0,
  }
  given = tuple(f"--config.{k}={v}" for k, v in settings.items())
  process = syncer_process(
    RunPlan(
      config=str(ROOT / "configs" / "tiny.py"),
      run_dir=run_dir,
      overrides=(*given, *overrides),
    )
  )
  model = f"--layout_arrays={run_dir.parent / 'theta.npz'}"
  return Process(
    name=process.name,
    argv=(*process.argv, model),
    again=(*process.again, model),
    env=process.env,
  )


def make_learner(learner: int) -> Process:
  argv = (
    sys.executable,
    str(CUSTOM),
    f"--syncer={ADDRESS}",
    f"--learner_id={learner}",
    "--step_s=0.05",
  )
  env = {"PYTHONPATH": str(MESSAGES)}
  return Process(name=f"learner-{learner}", argv=argv, again=argv, env=env)


@pytest.fixture(scope="module")
def storm(tmp_path_factory):
  """Three learners; learner 1 is killed at 33 % and back at 50 %."""
  base = tmp_path_factory.mktemp("storm")
  subprocess.run(
    [sys.executable, CUSTOM, f"--write_model={base / 'theta.npz'}"],
    check=True,
    env={"PYTHONPATH": str(MESSAGES)},
  )
  run_dir = base / "run"
  screen = SilentScreen()
  kills = (parse_kill("1@33%:50%", 3),)
  run = Run(
    [make_syncer(run_dir), *map(make_learner, range(3))],
    run_dir,
    LaunchConfig(),
    kills,
    say=screen.say,
  )
  code = local.drive(run, kills, local.StopRequests(), screen)
  return run_dir, run, code, screen


def test_a_run_with_a_planned_kill_ends_well(storm):
  _, run, code, screen = storm

  assert code == exits.OK, screen.said
  assert run.children["learner-1"].num_starts == 2
  assert all(child.exit_code == 0 for child in run.children.values())
  assert screen.num_shown > 0
  assert "killed learner-1 (SIGKILL at 33%, as planned)" in screen.said


def test_the_returned_learner_takes_part_again(storm):
  run_dir = storm[0]

  told = chronicle.read_history(run_dir)

  ends = [life.end for life in told.lives if life.learner == "1"]
  assert ends == ["lost", "run"]
  assert history.merges_after_return(told)["1"] >= 2
  assert history.uptime(told) == 1.0


def test_its_books_balance(storm):
  run_dir = storm[0]

  report.write_report(run_dir, {})

  told = json.loads((run_dir / "summary.json").read_text())
  assert told["tokens_processed"] > 0
  assert told["tokens_processed"] == pytest.approx(
    told["tokens_merged"] + told["tokens_discarded"] + told["tokens_pending"]
  )


def test_the_tape_of_a_run_with_a_kill_replays_to_an_equal_state(storm):
  replayed = tape.replay(storm[0] / "tape.jsonl")

  assert replayed.faults == ()
  assert replayed.closed


def test_a_directory_that_has_a_run_is_refused_with_its_code(storm):
  run_dir = storm[0]
  before = (run_dir / "address").read_text()
  screen = SilentScreen()
  run = Run([make_syncer(run_dir)], run_dir, LaunchConfig(), say=screen.say)

  code = local.drive(run, (), local.StopRequests(), screen)

  assert code == exits.IN_USE
  assert "--restore" in "\n".join(screen.said)
  assert (run_dir / "address").read_text() == before


def test_too_few_learners_end_the_run_with_its_code(storm, tmp_path):
  (tmp_path / "theta.npz").write_bytes(
    (storm[0].parent / "theta.npz").read_bytes()
  )
  run_dir = tmp_path / "run"
  screen = SilentScreen()
  syncer = make_syncer(
    run_dir,
    "--config.sync.quorum=3",
    "--config.sync.quorum_timeout_s=4.0",
  )
  run = Run(
    [syncer, make_learner(0), make_learner(1)],
    run_dir,
    LaunchConfig(finish_grace_s=1.0),
    say=screen.say,
  )

  code = local.drive(run, (), local.StopRequests(), screen)

  assert code == exits.QUORUM_TIMEOUT, screen.said


def test_timeouts_that_contradict_each_other_are_refused(tmp_path):
  screen = SilentScreen()
  syncer = make_syncer(tmp_path, "--config.sync.quorum_timeout_s=1.0")
  run = Run([syncer], tmp_path, LaunchConfig(), say=screen.say)

  code = local.drive(run, (), local.StopRequests(), screen)

  assert code == exits.BAD_USAGE
  assert "sync.lease_s < sync.quorum_timeout_s" in "\n".join(screen.said)
