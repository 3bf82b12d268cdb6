"""What a report says of a run whose syncer was stopped or killed, and restored.

What was not saved is rolled back: the report counts it as the books do, which
is not at all.
"""

import json

import pytest

from ddiloco_jax.protocol import events, machine, status
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.report import chronicle, history, report
from tests.protocol import driver
from tests.report.taped import Taped
from tests.support.over_grpc import (
  SHAPES,
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.served import wait_for

RULES = Rules(
  num_fragments=4,
  cycle_steps=12,
  num_syncer_steps=120,
  fragment_params=(10, 20, 30, 40),
)
SAVED_S, BACK_S = 40.2, 60.5


def processes(*nonces: str, start_at: float = 0.0) -> list[driver.Learner]:
  """One learner per nonce NAME-N."""
  made = []
  for nonce in nonces:
    learner = driver.Learner(name=nonce.partition("-")[0], start_at=start_at)
    learner.nonce = nonce
    made.append(learner)
  return made


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  """Saved at 40.2 s, killed at 58 s; learners are back at 60.5 s of the run.

  Learner 1 was started again after the checkpoint, and again at the end: both
  of these processes are incarnation 4. Learner 3 lived in between only.
  """
  run_dir = tmp_path_factory.mktemp("run")
  first = Taped(
    run_dir / "tape.1.jsonl",
    RULES,
    [*processes("0-0", "1-0", "2-0"), *processes("3-0", start_at=45.0)],
  )
  first.save_at(SAVED_S)
  first.at(43.5, lambda: first.kill("1"))
  first.at(44.5, lambda: first.restart("1"))
  first.run(58.0)
  first.tape.abandon()
  again = processes("1-2", "0-1", "2-1", start_at=BACK_S)
  last = Taped(run_dir / "tape.jsonl", RULES, again, first.saves[SAVED_S])
  last.run()
  last.tape.close(last.state)
  return run_dir, first, last


def test_merges_that_were_rolled_back_are_not_counted(killed):
  run_dir, first, last = killed
  newest = [f.version.n for f in last.state.fragments]
  decided = len(first.of(events.Merge)) + len(last.of(events.Merge))
  assert decided > sum(newest) + 4  # The case: some were rolled back.

  told = chronicle.read_history(run_dir)

  assert [[m.n for m in told.merges if m.fragment == p] for p in range(4)] == [
    list(range(1, n + 1)) for n in newest
  ]
  assert sum(f.num_merges for f in last.state.fragments) == len(told.merges)


def test_the_books_of_the_summary_are_those_of_the_last_status(killed):
  run_dir, _, last = killed

  told = report.write_report(run_dir, {})

  view = status.status(last.state, last.now)
  books = {book.name: book.tokens for book in view.books}
  assert told["tokens_merged"] == books["merged"]
  assert told["tokens_processed"] == books["reported"]
  assert told["realised_h"] == [f.realised_h for f in view.fragments]
  assert told["counters"] == view.counters
  assert json.loads((run_dir / "summary.json").read_text()) == told


def test_the_end_is_that_of_the_last_epoch(killed):
  run_dir, _, last = killed

  told = chronicle.read_history(run_dir)

  assert "t has reached 120" in told.ending
  ended = [t for t, e in zip(last.times, last.effects) if is_ending(e)]
  assert [told.end_s] == ended


def test_who_lived_in_what_was_rolled_back_only_is_no_contributor(killed):
  run_dir, first, last = killed
  assert first.state.learners["1"].incarnation == 4
  assert last.state.learners["1"].incarnation == 4

  told = chronicle.read_history(run_dir)

  lives = {
    (life.learner, life.incarnation): (life.start_s, life.end)
    for life in told.lives
  }
  assert lives == {
    ("0", 1): (0.0, "lost"),
    ("0", 5): (BACK_S, "run"),
    ("1", 2): (0.0, "lost"),
    ("1", 4): (BACK_S, "run"),
    ("2", 3): (0.0, "lost"),
    ("2", 6): (BACK_S, "run"),
  }
  assert {who for m in told.merges for who in m.contributors} == set(lives)
  assert set(history.merges_by_learner(told)) == {"0", "1", "2"}
  later = [m for m in told.merges if m.time_s > BACK_S]
  assert history.merges_after_return(told) == {
    name: sum((name, n) in m.contributors for m in later)
    for name, n in (("0", 5), ("1", 4), ("2", 6))
  }
  assert all(m.num_live <= 3 for m in told.merges)


def test_a_rolled_back_tail_does_not_fill_the_time_without_learners(killed):
  run_dir, _, _ = killed

  told = chronicle.read_history(run_dir)

  # Steps end at 40 s and begin again at 61.5 s; windows begin at 1 s.
  num = int((told.end_s - 1.0) / history.WINDOW_S)
  assert history.uptime(told) == pytest.approx(1 - 4 / num)
  for life in told.lives:
    times = [p.time_s for p in life.progress]
    assert times == sorted(times)
    assert not [t for t in times if SAVED_S < t < BACK_S]


def test_a_syncer_killed_in_its_first_line_leaves_no_epoch(killed, tmp_path):
  run_dir, first, _ = killed
  text = (run_dir / "tape.1.jsonl").read_text()
  (tmp_path / "tape.1.jsonl").write_text(text)
  (tmp_path / "tape.2.jsonl").write_text(text[:30])
  (tmp_path / "tape.jsonl").touch()

  told = chronicle.read_history(tmp_path)

  assert told.ending == ""
  assert len(told.merges) == sum(f.version.n for f in first.state.fragments)


def test_a_merge_under_way_is_none_yet(killed, tmp_path):
  run_dir, _, _ = killed
  lines = (run_dir / "tape.1.jsonl").read_text().splitlines(keepends=True)
  at = [i for i, line in enumerate(lines) if '"merges"' in line][9]
  (tmp_path / "tape.jsonl").write_text("".join(lines[: at + 1]))

  told = chronicle.read_history(tmp_path)

  assert len(told.merges) == 9


def test_a_run_that_was_stopped_and_extended_ends_once(tmp_path):
  first = Taped(tmp_path / "tape.1.jsonl", RULES, processes("0-0", "1-0"))
  stop = events.StopRequested(reason="SIGTERM was received")
  first.at(50.5, lambda: first.tell(stop))
  first.run()
  first.tape.close(first.state)
  saved = machine.save(first.state)
  again = processes("0-1", "1-1", start_at=first.now + 1)
  last = Taped(tmp_path / "tape.jsonl", RULES, again, saved)
  last.run()
  last.tape.close(last.state)

  told = chronicle.read_history(tmp_path)

  assert "t has reached 120" in told.ending
  assert told.end_s > 110
  assert len(told.merges) == sum(f.version.n for f in last.state.fragments)
  # The run ended; no process of it was lost.
  assert [life.end for life in told.lives] == ["run"] * 4


def test_a_real_run_that_was_restored_is_told_as_its_status_does(tmp_path):
  run_dir = tmp_path / "run"
  with (
    served_run(settings(quorum=2), run_dir) as run,
    learners(*pair(run.address)),
  ):
    wait_for(lambda: num_merges(run) >= 6)
    run.request_stop("SIGTERM was received")
    run.wait()
  with served_run(settings(quorum=2), run_dir, restore=True) as run:
    before = num_merges(run)
    with learners(*pair(run.address)):
      wait_for(lambda: num_merges(run) >= before + 6)
      run.request_stop("enough")
      run.wait()
    view = run.status()

  told = report.write_report(run_dir, {})

  books = {book.name: book.tokens for book in view.books}
  assert told["tokens_merged"] == books["merged"] > 0
  assert told["tokens_processed"] == books["reported"]
  assert told["num_merges"] == sum(f.version.n for f in view.fragments)
  assert told["realised_h"] == [f.realised_h for f in view.fragments]
  assert told["contributors_median"] == 2
  assert "enough" in told["ending"]
  assert "lost at" not in (run_dir / "report.html").read_text()


def is_ending(effect: events.Effect) -> bool:
  return isinstance(effect, events.Ending)


def num_merges(run) -> int:
  return sum(f.version.n for f in run.status().fragments)


def pair(address: str) -> list[LoopLearner]:
  return [
    LoopLearner(address, name, paced(0.03, shapes=SHAPES))
    for name in ("ada", "bob")
  ]
