"""The tape: replay decides the same, and says where it does not."""

import json
import math
import subprocess
import sys

import pytest

from ddiloco_jax.cli import replay
from ddiloco_jax.protocol import events, lines, machine, saved, tape
from ddiloco_jax.protocol.events import Counts, Outcome, Position, Version
from ddiloco_jax.protocol.rules import Rules
from tests.protocol.driver import Learner, Run

RULES = Rules(num_fragments=4, cycle_steps=8, num_syncer_steps=40)


def record(path, run: Run, *, close: bool = True) -> machine.State:
  state = machine.initial(run.rules)
  writer = tape.TapeWriter(path, tape.header(state, run_id="test"))
  for event in run.events:
    state, effects = machine.step(state, event)
    writer.append(event, effects, state)
  if close:
    writer.close(state)
  else:
    writer.abandon()
  return state


@pytest.fixture(scope="module")
def run() -> Run:
  learners = [Learner(f"L{i}", start_at=0.1 * i) for i in range(3)]
  run = Run(RULES, learners).run(20)
  run.kill("L1")
  run.run(24)
  run.restart("L1")
  return run.run(10**4)


def test_a_run_with_a_kill_replays_to_an_equal_state(run, tmp_path):
  record(tmp_path / "tape.jsonl", run)

  result = tape.replay(tmp_path / "tape.jsonl")

  assert result.faults == ()
  assert result.closed
  assert not result.torn
  assert result.num_events == len(run.events)
  assert result.state == run.state
  assert machine.digest(result.state) == machine.digest(run.state)


def test_every_line_is_strict_json_and_merges_are_written_out(run, tmp_path):
  record(tmp_path / "tape.jsonl", run)

  def refuse(word):
    raise AssertionError(word)

  lines = [
    json.loads(text, parse_constant=refuse)
    for text in (tmp_path / "tape.jsonl").read_text().splitlines()
  ]

  merges = [merge for line in lines for merge in line.get("merges", ())]
  assert len(merges) == len(run.of(events.Merge))
  assert lines[0]["tape"] == tape.FORMAT
  assert lines[-1]["end"] == len(run.events)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_survives_the_tape(norm, tmp_path):
  event = events.Replied(
    time=1.5,
    learner="L0",
    incarnation=3,
    fragment=1,
    round=2,
    attempt=1,
    base=Version(1, 4),
    counts=Counts(3, 30),
    norm=norm,
    positions=(Position(0, 7),),
  )

  again = lines.decode_event(
    json.loads(json.dumps(saved.encode(events.to_dict(event))))
  )

  assert isinstance(again, events.Replied)
  assert str(again) == str(event)


def test_every_kind_of_event_comes_back_equal(run):
  kinds = {type(event) for event in run.events}
  assert {events.Joined, events.Reported, events.Replied} <= kinds

  for event in run.events[:300]:
    values = json.loads(json.dumps(events.to_dict(event)))
    assert lines.decode_event(values) == event


def test_an_altered_event_is_named_by_its_line(run, tmp_path):
  path = tmp_path / "tape.jsonl"
  record(path, run)
  lines = path.read_text().splitlines()
  at = next(
    i for i, text in enumerate(lines) if '"Replied"' in text and i > 100
  )
  values = json.loads(lines[at])
  values["event"]["counts"][1] += 1
  lines[at] = json.dumps(values)
  path.write_text("\n".join(lines) + "\n")

  result = tape.replay(path)

  assert len(result.faults) == 1
  assert result.faults[0].startswith(f"line {at + 1}: Replied decided")


def test_a_torn_last_line_is_said_and_not_fatal(run, tmp_path):
  path = tmp_path / "tape.jsonl"
  record(path, run, close=False)
  text = path.read_text()
  path.write_text(text[:-40])

  result = tape.replay(path)

  assert result.torn
  assert result.faults == ()
  assert result.num_events == len(run.events) - 1


def test_a_restored_run_goes_on_on_the_same_tape(run, tmp_path):
  path = tmp_path / "tape.jsonl"
  state = record(path, run, close=False)
  path.write_text(path.read_text() + '{"event":{"type":"Tick')
  restored = machine.restore(
    Rules(num_fragments=4, cycle_steps=8, num_syncer_steps=99),
    machine.save(state),
  )

  writer = tape.TapeWriter(path, tape.header(restored, run_id="test"))
  event = events.Joined(time=restored.now + 1, learner="L9", nonce="n")
  restored, effects = machine.step(restored, event)
  writer.append(event, effects, restored)
  writer.close(restored)

  result = tape.replay(path)
  assert result.faults == ()
  assert not result.torn
  assert result.num_epochs == 2
  assert result.state == restored


def test_replay_of_what_is_no_tape_says_so(tmp_path):
  (tmp_path / "empty").write_text("")
  (tmp_path / "other").write_text('{"loss": 1}\n')
  (tmp_path / "text").write_text("hello\n")
  (tmp_path / "new").write_text('{"tape": 99}\n')

  for name, word in (
    ("empty", "no whole header"),
    ("other", "begins with a header"),
    ("text", "no JSON"),
    ("new", "format 99"),
  ):
    with pytest.raises(tape.TapeError, match=word):
      tape.replay(tmp_path / name)


def test_the_command_prints_a_short_result(run, tmp_path, capsys):
  path = tmp_path / "tape.jsonl"
  record(path, run)

  assert replay.main([str(path)]) == 0

  assert "equal: every decision" in capsys.readouterr().out
  assert replay.main([str(path), "--json"]) == 0
  values = json.loads(capsys.readouterr().out)
  assert values["equal"] is True
  assert values["num_events"] == len(run.events)


def test_the_command_fails_on_a_difference_and_on_a_missing_file(
  run, tmp_path, capsys
):
  path = tmp_path / "tape.jsonl"
  record(path, run)
  path.write_text(path.read_text().replace('"steps"', '"steps"'))
  lines = path.read_text().splitlines()
  at = next(i for i, text in enumerate(lines) if '"digest":"' in text and i > 9)
  values = json.loads(lines[at])
  values["digest"] = "0" * 16
  lines[at] = json.dumps(values)
  path.write_text("\n".join(lines) + "\n")

  assert replay.main([str(path)]) == 1
  assert f"DIFFERS: line {at + 1}" in capsys.readouterr().out
  assert replay.main([str(tmp_path / "none")]) == 2
  assert "cannot read" in capsys.readouterr().err


def test_digests_do_not_depend_on_the_process(run, tmp_path):
  path = tmp_path / "tape.jsonl"
  record(path, run)

  found = subprocess.run(
    [sys.executable, "-m", "ddiloco_jax.cli.replay", str(path), "--json"],
    env={"PYTHONHASHSEED": "7"},
    capture_output=True,
    text=True,
    check=False,
  )

  assert found.returncode == 0, found.stderr
  assert json.loads(found.stdout)["digest"] == machine.digest(run.state)


def test_replay_does_not_import_jax():
  code = "import sys, ddiloco_jax.cli.replay; print('jax' in sys.modules)"

  found = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )

  assert found.stdout.strip() == "False"


def test_a_saved_state_of_another_format_or_p_is_refused(run):
  values = machine.save(run.state)

  with pytest.raises(ValueError, match="format 7"):
    machine.load(RULES, {**values, "format": 7})
  before = {k: v for k, v in values.items() if k != "shards"}
  with pytest.raises(ValueError, match=r"format 1.*the release that wrote it"):
    machine.load(RULES, {**before, "format": 1})
  with pytest.raises(ValueError, match="P may not change"):
    machine.load(Rules(), values)
  with pytest.raises(ValueError, match="does not come after"):
    machine.restore(RULES, values, 1)


def test_outcomes_on_the_tape_are_words():
  assert saved.encode(Outcome.INCLUDED) == "included"
