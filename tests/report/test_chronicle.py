"""A run in virtual time, its tape, and what a report says of it."""

import json

import pytest

from ddiloco_jax.protocol import events, machine
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.report import chronicle, history, report
from tests.protocol import driver
from tests.report.taped import Taped

HELD_OUT = {"loss_start": 5.5, "loss_end": 2.2, "bigram_entropy": 2.6}


@pytest.fixture(scope="module")
def storm(tmp_path_factory):
  """Four learners, the second lost at 40 s and back at 80 s of 120."""
  run_dir = tmp_path_factory.mktemp("run")
  rules = Rules(
    num_fragments=4,
    cycle_steps=12,
    num_syncer_steps=120,
    fragment_params=(10, 20, 30, 40),
  )
  learners = [driver.Learner(name=str(n)) for n in range(4)]
  run = Taped(run_dir / "tape.jsonl", rules, learners)
  run.at(40.5, lambda: run.kill("1"))
  run.at(80.5, lambda: run.restart("1"))
  run.run()
  run.tape.close(run.state)
  return run_dir, run


def test_the_lives_of_a_killed_learner_are_two(storm):
  run_dir, _ = storm

  told = chronicle.read_history(run_dir)

  lives = [life for life in told.lives if life.learner == "1"]
  assert [life.end for life in lives] == ["lost", "run"]
  assert lives[0].end_s == pytest.approx(40.5)
  assert lives[1].start_s == pytest.approx(80.5)
  others = [life for life in told.lives if life.learner != "1"]
  assert [life.end for life in others] == ["run"] * 3


def test_merges_are_those_that_the_machine_decided(storm):
  run_dir, run = storm

  told = chronicle.read_history(run_dir)

  decided = run.of(events.Merge)
  assert [m.fragment for m in told.merges] == [m.fragment for m in decided]
  assert [len(m.contributors) for m in told.merges] == [
    len(m.inputs) for m in decided
  ]
  assert history.contributors_median(told) >= 3
  assert history.merges_after_return(told)["1"] >= 2


def test_the_run_was_up_all_the_time_and_says_why_it_ended(storm):
  run_dir, _ = storm

  told = chronicle.read_history(run_dir)

  assert history.uptime(told) == 1.0
  assert "t has reached 120" in told.ending
  assert 115 < told.end_s < 130


def test_the_books_balance_and_h_is_near_what_was_configured(storm):
  run_dir, _ = storm

  told = report.write_report(run_dir, HELD_OUT)

  assert told["tokens_processed"] == pytest.approx(
    told["tokens_merged"] + told["tokens_discarded"] + told["tokens_pending"]
  )
  # Three learners of 120 steps of 100 tokens, and one that lost 40.
  assert told["tokens_processed"] == pytest.approx(44_000, rel=0.05)
  assert len(told["realised_h"]) == 4
  assert all(abs(h - 12) <= 3 for h in told["realised_h"])


def test_both_files_are_written(storm):
  run_dir, _ = storm

  report.write_report(run_dir, HELD_OUT)

  told = json.loads((run_dir / "summary.json").read_text())
  assert told["run_id"] == "r1"
  assert {
    "loss_start",
    "loss_end",
    "uptime",
    "contributors_median",
    "learners_live_median",
    "realised_h",
    "configured_h",
    "tokens_processed",
    "tokens_merged",
    "tokens_discarded",
    "tokens_pending",
  } <= set(told)
  assert "lost at 40 s" in (run_dir / "report.html").read_text()


def test_a_torn_last_line_is_no_obstacle(storm, tmp_path):
  run_dir, _ = storm
  text = (run_dir / "tape.jsonl").read_text()
  (tmp_path / "tape.jsonl").write_text(text[: len(text) // 2])

  told = chronicle.read_history(tmp_path)

  assert len(told.merges) > 0
  assert told.ending == ""


def test_a_learner_that_reconnects_goes_on_with_its_life():
  rules = Rules(num_fragments=1, cycle_steps=4)
  state, notes = machine.initial(rules), chronicle.Chronicle()

  def tell(event):
    nonlocal state
    state, effects = machine.step(state, event)
    notes.note(event, effects, state)

  tell(events.Joined(time=1, learner="a", nonce="x"))
  tell(events.Disconnected(time=5, learner="a", incarnation=1))
  tell(events.Joined(time=6, learner="a", nonce="x"))
  tell(events.Heard(time=9, learner="a", incarnation=1))

  (life,) = notes.history("r", state).lives
  assert (life.start_s, life.end_s, life.end) == (1, 9, "run")


@pytest.mark.parametrize(
  ("adopted_at", "steps", "taken"),
  [
    (0, (1, 2, 3), 3),  # A new process counts from 0,
    (4, (6, 7), 2),  # one that goes on from a snapshot from there,
    (0, (6, 7), 2),  # and one that started over from where it was.
  ],
)
def test_the_steps_of_a_life_are_its_own(adopted_at, steps, taken):
  state = machine.initial(Rules(num_fragments=1, cycle_steps=4))
  notes = chronicle.Chronicle()
  version = events.Version(1, 0)

  def tell(kind, n, **fields):
    nonlocal state
    event = kind(time=n, learner="a", incarnation=n, **fields)
    state, effects = machine.step(state, event)
    notes.note(event, effects, state)

  def live(n, adopted_at, steps):
    nonlocal state
    event = events.Joined(time=n, learner="a", nonce=str(n), takeover=True)
    state, effects = machine.step(state, event)
    notes.note(event, effects, state)
    tell(events.Applied, n, fragment=0, version=version, step=adopted_at)
    for step in steps:
      tell(events.Reported, n, step=step, counts=(events.Counts(1, 1),))

  live(1, 0, (1, 2, 3, 4, 5))
  live(2, adopted_at, steps)

  told = notes.history("r", state)
  assert history.steps_by_learner(told) == {"a": 5 + taken}


def test_one_that_says_goodbye_has_left():
  rules = Rules(num_fragments=1, cycle_steps=4)
  state, notes = machine.initial(rules), chronicle.Chronicle()

  for event in (
    events.Joined(time=1, learner="a", nonce="x"),
    events.Left(time=5, learner="a", incarnation=1, reason="SIGTERM"),
  ):
    state, effects = machine.step(state, event)
    notes.note(event, effects, state)

  (life,) = notes.history("r", state).lives
  assert (life.end_s, life.end) == (5, "left")


def test_tapes_of_all_epochs_are_read_in_order(tmp_path):
  for name in ("tape.jsonl", "tape.10.jsonl", "tape.2.jsonl", "tape.x.jsonl"):
    (tmp_path / name).write_text("{}\n")
  # Of a syncer that ended as it started: no epoch began with it.
  (tmp_path / "tape.3.jsonl").touch()
  (tmp_path / "tape.4.jsonl").write_text('{"tape": 4, "ru')

  names = [path.name for path in chronicle.tapes_of(tmp_path)]

  assert names == ["tape.2.jsonl", "tape.10.jsonl", "tape.jsonl"]


def test_a_directory_without_a_tape_is_an_error(tmp_path):
  with pytest.raises(ValueError, match="no tape"):
    chronicle.read_history(tmp_path)
