"""Damaged tapes: the command says where, what and the way on; never a traceback."""

import json
import random

import pytest

from ddiloco_jax.cli import replay
from ddiloco_jax.protocol.rules import Rules
from tests.protocol.driver import Learner
from tests.report.taped import Taped

AT = 60  # The line that is damaged, from 0: in the middle of the run.


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> list[bytes]:
  """A whole tape of a short run, line by line."""
  path = tmp_path_factory.mktemp("run") / "tape.jsonl"
  rules = Rules(num_fragments=2, cycle_steps=4, num_syncer_steps=16)
  run = Taped(path, rules, [Learner("L0"), Learner("L1", start_at=0.1)])
  run.run()
  run.tape.close(run.state)
  return path.read_bytes().splitlines(keepends=True)


def find(lines: list[bytes], kind: str) -> int:
  """The first line after AT with an event of a kind."""
  wanted = f'"type":"{kind}"'.encode()
  return next(i for i, line in enumerate(lines) if i > AT and wanted in line)


def changed(line: bytes, change) -> bytes:
  values = json.loads(line)
  change(values)
  return json.dumps(values).encode() + b"\n"


def replayed(tmp_path, lines: list[bytes], capsys) -> tuple[int, str, str]:
  """Exit code, output and errors of the command."""
  path = tmp_path / "tape.jsonl"
  path.write_bytes(b"".join(lines))
  code = replay.main([str(path)])
  return code, *capsys.readouterr()


DAMAGE = {
  "cut": (lambda line: line[:50] + b"\n", "no JSON: "),
  "not utf-8": (lambda line: b"\xff\xfe\x00" + line, "no JSON: 'utf-8'"),
  "zeros": (lambda line: b"\0" * len(line) + b"\n", "no JSON: "),
  "empty": (lambda line: b"\n", "no JSON: "),
  "number": (lambda line: b"7\n", "no JSON object"),
  "list": (lambda line: b"[]\n", "no JSON object"),
  "deep": (lambda line: b"[" * 100_000 + b"\n", "no JSON: "),
  "long number": (lambda line: b"1" * 10_000 + b"\n", "no JSON: "),
  "nan": (lambda line: b'{"event": NaN}\n', "NaN is no JSON value"),
  "no keys": (lambda line: b"{}\n", "'event' and 'digest'"),
}


@pytest.mark.parametrize(
  ("damage", "words"), DAMAGE.values(), ids=DAMAGE.keys()
)
def test_a_damaged_line_is_named(damage, words, lines, tmp_path, capsys):
  some = [*lines[:AT], damage(lines[AT]), *lines[AT + 1 :]]

  code, out, err = replayed(tmp_path, some, capsys)

  expect(code, out, err, AT, words)


def drop(name):
  return lambda values: values["event"].pop(name)


def put(name, value):
  return lambda values: values["event"].update({name: value})


EVENTS = {
  "no type": ("Reported", drop("type"), "there is no event None"),
  "unknown event": ("Reported", put("type", "Rpt"), "no event 'Rpt'"),
  "an effect": ("Reported", put("type", "Merge"), "no event 'Merge'"),
  "a module": ("Reported", put("type", "enum"), "no event 'enum'"),
  "type of a type": ("Reported", put("type", []), "no event []"),
  "missing field": ("Reported", drop("step"), "'step'"),
  "unknown field": ("Reported", put("x", 1), "Reported has no field 'x'"),
  "text for number": ("Reported", put("step", "7"), "step: '7' is no int"),
  "share for number": ("Reported", put("step", 7.5), "step: 7.5 is no int"),
  "null": ("Replied", put("counts", None), "counts: None is no array"),
  "truth": ("Replied", put("norm", True), "norm: True is no float"),
  "word": ("Replied", put("norm", "big"), "norm: 'big' is no float"),
  "short pair": ("Replied", put("base", [1]), "'n'"),
  "long pair": ("Replied", put("base", [1, 2, 3]), "more than the 2 fields"),
  "object": ("Replied", put("positions", {}), "positions: {} is no array"),
  "few counts": ("Reported", put("counts", []), "Reported cannot follow"),
}


@pytest.mark.parametrize(
  ("kind", "change", "words"), EVENTS.values(), ids=EVENTS.keys()
)
def test_a_damaged_event_is_named(kind, change, words, lines, tmp_path, capsys):
  at = find(lines, kind)
  some = [*lines[:at], changed(lines[at], change), *lines[at + 1 :]]

  code, out, err = replayed(tmp_path, some, capsys)

  expect(code, out, err, at, words)


def under(name, **changes):
  return lambda values: values[name].update(changes)


HEADERS = {
  "no rules": (lambda v: v.pop("rules"), "'rules'"),
  "no start": (lambda v: v.pop("start"), "'start'"),
  "start is text": (lambda v: v.update(start="x"), "start: 'x' is no object"),
  "other rule": (under("rules", pace_of=1), "Rules has no field 'pace_of'"),
  "rule is text": (under("rules", quorum="2"), "quorum: '2' is no int"),
  "other state": (under("start", x=1), "State has no field 'x'"),
  "state is text": (under("start", t="1"), "t: '1' is no int"),
  "old state": (under("start", format=7), "format 7"),
  "less state": (lambda v: v["start"].pop("syncs"), "'syncs'"),
  "other P": (under("rules", num_fragments=3), "P may not change"),
}


@pytest.mark.parametrize(
  ("change", "words"), HEADERS.values(), ids=HEADERS.keys()
)
def test_a_damaged_header_is_named(change, words, lines, tmp_path, capsys):
  some = [changed(lines[0], change), *lines[1:]]

  code, out, err = replayed(tmp_path, some, capsys)

  assert (code, out, err.count("\n")) == (2, "", 1), err
  assert "tape.jsonl, line 1: " in err
  assert words in err
  assert err.endswith("give the tape.jsonl of a run directory\n")


def test_what_cannot_be_read_is_said_in_one_line(tmp_path, capsys):
  for path in (tmp_path / "none", tmp_path / "none" / "tape.jsonl"):
    assert replay.main([str(path)]) == 2

    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"cannot read {path}: " in err
    assert "give the tape.jsonl of a run directory" in err


def test_a_directory_without_a_tape_is_said_in_one_line(tmp_path, capsys):
  assert replay.main([str(tmp_path)]) == 2

  out, err = capsys.readouterr()
  assert (out, err.count("\n")) == ("", 1)
  assert f"{tmp_path} has no tape.jsonl" in err


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02\x01\x00", b'{"tape":1'])
def test_a_file_without_a_whole_line_is_no_tape(data, tmp_path, capsys):
  code, out, err = replayed(tmp_path, [data], capsys)

  assert (code, out, err.count("\n")) == (2, "", 1)
  assert "no whole header; give the tape.jsonl of a run directory" in err


def test_a_torn_last_line_is_noted_and_all_before_it_is_equal(
  lines, tmp_path, capsys
):
  for end in (lines[AT][:40], lines[AT].rstrip(b"\n"), b"\xff\0"):
    code, out, err = replayed(tmp_path, [*lines[:AT], end], capsys)

    assert (code, err) == (0, "")
    assert f"{AT - 1} events of 1 epoch(s) replayed" in out
    assert "the last line is torn" in out
    assert "equal: every decision is the one on the tape" in out


def test_an_end_line_that_counts_other_events_differs(lines, tmp_path, capsys):
  for end in (len(lines) - 3, len(lines) - 1):
    last = changed(lines[-1], lambda v, end=end: v.update(end=end))

    code, out, _ = replayed(tmp_path, [*lines[:-1], last], capsys)

    assert code == 1
    assert (
      f"DIFFERS: line {len(lines)}: the end line counts {end} events of its "
      f"epoch, and {len(lines) - 2} were read"
    ) in out


def test_a_fault_of_one_epochs_end_is_not_forgotten_in_the_next(
  lines, tmp_path, capsys
):
  last = changed(lines[-1], lambda v: v.update(end=7))

  code, out, _ = replayed(tmp_path, [*lines[:-1], last, *lines], capsys)

  assert code == 1
  assert f"line {len(lines)}: the end line counts 7 events" in out


def test_nothing_but_a_header_follows_an_end_line(lines, tmp_path, capsys):
  code, out, err = replayed(tmp_path, [*lines, lines[AT]], capsys)

  expect(code, out, err, len(lines), "only a header may follow an end line")
  code, out, _ = replayed(tmp_path, [*lines, *lines], capsys)
  assert code == 0
  assert "of 2 epoch(s) replayed" in out


def test_merges_that_are_not_those_decided_differ(lines, tmp_path, capsys):
  at = next(i for i, line in enumerate(lines) if b'"merges"' in line)

  def weigh(values):
    values["merges"][0]["inputs"][0][1] += 1.0

  for change in (weigh, lambda values: values.pop("merges")):
    some = [*lines[:at], changed(lines[at], change), *lines[at + 1 :]]
    code, out, _ = replayed(tmp_path, some, capsys)

    assert code == 1
    assert f"line {at + 1}: other merges are written than decided" in out


@pytest.mark.parametrize("seed", range(8))
def test_no_damage_at_all_ends_in_a_traceback(seed, lines, tmp_path, capsys):
  rng = random.Random(seed)
  seen = set()
  for _ in range(25):
    at = rng.randrange(len(lines))
    some = [*lines[:at], spoil(rng, lines[at]), *lines[at + 1 :]]

    code, _, err = replayed(tmp_path, some, capsys)

    assert code in (0, 1, 2)
    assert err.count("\n") == (code == 2), err
    seen.add(code)
  assert 2 in seen


def spoil(rng: random.Random, line: bytes) -> bytes:
  """Flips bytes, or puts another value somewhere into the object."""
  if rng.random() < 0.3:
    data = bytearray(line[:-1])
    for _ in range(3):
      data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data) + b"\n"
  values = json.loads(line)
  place, key = rng.choice(list(places(values)))
  other = [None, -1, 10**30, 1e300, "", "é", True, [], {}, [[1]], {"type": 1}]
  place[key] = rng.choice(other)
  return json.dumps(values).encode() + b"\n"


def places(values):
  """(container, key) of every value in a JSON value, however deep."""
  if isinstance(values, dict | list):
    keys = values if isinstance(values, dict) else range(len(values))
    for key in list(keys):
      yield values, key
      yield from places(values[key])


def expect(code: int, out: str, err: str, at: int, words: str) -> None:
  assert (code, out, err.count("\n")) == (2, "", 1), err
  assert f"tape.jsonl, line {at + 1}: " in err
  assert words in err
  assert f"head -n {at})" in err
