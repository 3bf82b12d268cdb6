"""The report of a real run whose syncer was killed and restored."""

import signal

from ddiloco_jax.protocol import status, tape
from ddiloco_jax.report import chronicle, report
from tests.support.over_grpc import (
  SHAPES,
  LoopLearner,
  learners,
  paced,
)
from tests.support.processes import (
  SYNCER,
  address_of,
  ending,
  module,
  small_run,
)
from tests.support.served import wait_for


def test_a_report_says_what_the_last_epochs_books_say(tmp_path):
  run_dir = tmp_path / "run"
  flags = small_run(
    tmp_path,
    sync__cycle_steps=4,
    run__checkpoint_every_s=0.5,
    wire__up_format="float32",
  )
  with ending() as start:
    first = start(
      module(SYNCER, "--address=127.0.0.1:0", *flags), tmp_path / "1.log"
    )
    address = address_of(run_dir, first)
    two = [
      LoopLearner(address, name, paced(0.03, shapes=SHAPES))
      for name in ("ada", "bob")
    ]
    with learners(*two):
      wait_for(lambda: num_adopted(two) >= 12, 60.0)
      first.signal(signal.SIGKILL)
      first.wait()
      second = start(
        module(SYNCER, f"--address={address}", "--restore", *flags),
        tmp_path / "2.log",
      )
      address_of(run_dir, second)
      before = num_adopted(two)
      wait_for(lambda: num_adopted(two) >= before + 12, 60.0)
      second.signal(signal.SIGTERM)
      assert second.wait(30.0) == 0, second.said()

  told = report.write_report(run_dir, {})

  last = tape.replay(run_dir / "tape.jsonl").state
  view = status.status(last, last.now)
  books = {book.name: book.tokens for book in view.books}
  assert last.epoch == 2
  assert told["tokens_merged"] == books["merged"] > 0
  assert told["tokens_processed"] == books["reported"]
  assert told["realised_h"] == [f.realised_h for f in view.fragments]
  assert told["num_merges"] == sum(f.version.n for f in view.fragments)
  assert told["contributors_median"] == 2
  assert told["uptime"] == 1.0
  assert "SIGTERM" in told["ending"]
  history = chronicle.read_history(run_dir)
  assert {life.end for life in history.lives} <= {"run", "left"}
  assert [life.learner for life in history.lives] == ["ada", "bob"]
  for p in range(2):
    merged = [m.n for m in history.merges if m.fragment == p]
    assert merged == list(range(1, len(merged) + 1))


def num_adopted(two: list[LoopLearner]) -> int:
  return sum(len(each.adopted) for each in two)
