"""The tape: every event the machine consumed, with a digest of its decisions.

One JSON object a line: a header at every start of a syncer, then the events.
Re-stepping the machine over it must decide the same. (arXiv 2604.21428, App.)
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from ddiloco_jax.protocol import events, machine, saved
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.protocol.state import State

FORMAT = 1
# A digest of the whole state costs about a millisecond: not on every line.
STATE_DIGEST_EVERY = 1000


class TapeError(ValueError):
  """A tape that cannot be read: what is wrong with it, and where."""


def header(
  state: State, *, run_id: str = "", libraries: dict[str, str] | None = None
) -> dict[str, Any]:
  """The first line of an epoch: all that its replay starts from."""
  return {
    "tape": FORMAT,
    "run_id": run_id,
    "epoch": state.epoch,
    "libraries": libraries or {},
    "rules": saved.encode(state.rules),
    "start": machine.save(state),
  }


def digest(effects: tuple[events.Effect, ...]) -> str:
  """A name of what was decided, reasons included; "" for nothing."""
  if not effects:
    return ""
  text = _dump([events.to_dict(effect) for effect in effects])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


class TapeWriter:
  """Appends to a tape; a line is written whole before `append` returns."""

  def __init__(self, path: str | os.PathLike[str], head: dict[str, Any]):
    self._path = pathlib.Path(path)
    _cut_torn_line(self._path)
    # Line buffered: a killed syncer loses at most the line being written.
    self._file = self._path.open("a", encoding="utf-8", buffering=1)
    self._file.write(_dump(head) + "\n")
    self._num_events = 0

  def append(
    self,
    event: events.Event,
    effects: tuple[events.Effect, ...],
    state: State,
  ) -> None:
    """Writes one event that `machine.step` turned into `effects` and `state`.

    A merge is written out (inputs in order of acceptance, weights), so that a
    reader need not re-step to know what was merged.
    """
    line: dict[str, Any] = {
      "event": events.to_dict(event),
      "digest": digest(effects),
    }
    merges = [events.to_dict(e) for e in effects if type(e) is events.Merge]
    if merges:
      line["merges"] = merges
    self._num_events += 1
    if self._num_events % STATE_DIGEST_EVERY == 0:
      line["state"] = machine.digest(state)
    self._file.write(_dump(line) + "\n")

  def close(self, state: State) -> None:
    """Ends the tape of this epoch with a digest of the last state."""
    end = {"end": self._num_events, "state": machine.digest(state)}
    with self._file:
      self._file.write(_dump(end) + "\n")

  def abandon(self) -> None:
    """Closes the file without an end line, as a killed syncer would."""
    self._file.close()


class Line(NamedTuple):
  """One replayed event.

  Attributes:
    number: Of the line in the file, from 1.
    fault: How it differs from what the tape says; "" if it does not.
  """

  number: int
  event: events.Event
  effects: tuple[events.Effect, ...]
  state: State
  fault: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
  """What a replay found.

  Attributes:
    num_events: Replayed events, over all epochs on the tape.
    num_epochs: Headers on the tape.
    state: The last state.
    faults: Sentences naming a line, the first few; empty if all is equal.
    torn: The last line is not whole: the syncer was killed while writing it.
    closed: The tape ends with the digest of its last state.
  """

  num_events: int
  num_epochs: int
  state: State
  faults: tuple[str, ...]
  torn: bool
  closed: bool


def replay(path: str | os.PathLike[str]) -> ReplayResult:
  """Re-steps the machine over a tape and compares every digest.

  Stops at the first line that differs: what follows would differ by it.

  Raises:
    TapeError: The file is no tape, or is damaged before its last line.
    OSError: It cannot be read.
  """
  reader = Reader(path)
  num_events, fault = 0, ""
  for line in reader.lines():
    num_events += 1
    if line.fault:
      fault = line.fault
      break
  assert reader.state is not None
  return ReplayResult(
    num_events=num_events,
    num_epochs=reader.num_epochs,
    state=reader.state,
    faults=tuple(f for f in (fault, reader.fault) if f),
    torn=reader.torn,
    closed=reader.closed,
  )


class Reader:
  """Reads a tape; its attributes are true of what `lines` has yielded."""

  def __init__(self, path: str | os.PathLike[str]):
    self.path = pathlib.Path(path)
    self.state: State | None = None
    self.headers: list[dict[str, Any]] = []
    self.fault = ""
    self.torn = False
    self.closed = False

  @property
  def num_epochs(self) -> int:
    return len(self.headers)

  def lines(self) -> Iterator[Line]:
    """Every event, re-stepped."""
    number = 0
    with self.path.open(encoding="utf-8") as file:
      for number, text in enumerate(file, start=1):
        if not text.endswith("\n"):
          self.torn = True
          break
        values = _parse(text, number, self.path)
        if number == 1 and "tape" not in values:
          raise TapeError(f"{self.path} is no tape: line 1 has no header")
        if "tape" in values:
          self._start(values, number)
        elif "end" in values:
          self._end(values, number)
        else:
          yield self._step(values, number)
    if self.state is None:
      raise TapeError(
        f"{self.path} is no tape: it has {number} lines and no whole header; "
        "give the tape.jsonl of a run directory"
      )

  def _start(self, values: dict[str, Any], number: int) -> None:
    if values["tape"] != FORMAT:
      raise TapeError(
        f"{self.path}, line {number}: tape format {values['tape']!r}, and this "
        f"release reads {FORMAT}; replay it with the release that wrote it"
      )
    rules = saved.decode(Rules, values["rules"])
    self.state = machine.load(rules, values["start"])
    self.headers.append(values)
    self.closed = False

  def _step(self, values: dict[str, Any], number: int) -> Line:
    assert self.state is not None
    event = decode_event(values["event"])
    self.state, effects = machine.step(self.state, event)
    fault, found = "", digest(effects)
    if found != values["digest"]:
      kinds = ", ".join(type(e).__name__ for e in effects) or "nothing"
      fault = (
        f"line {number}: {values['event']['type']} decided {found!r} ({kinds}) "
        f"and the tape says {values['digest']!r}"
      )
    elif "state" in values:
      fault = self._compare(values["state"], number)
    return Line(number, event, effects, self.state, fault)

  def _end(self, values: dict[str, Any], number: int) -> None:
    self.closed = True
    self.fault = self._compare(values["state"], number)

  def _compare(self, expected: str, number: int) -> str:
    assert self.state is not None
    found = machine.digest(self.state)
    if found == expected:
      return ""
    return (
      f"line {number}: the state's digest is {found[:16]} and the tape says "
      f"{expected[:16]}"
    )


def decode_event(values: dict[str, Any]) -> events.Event:
  """The event that `events.to_dict` made these values of."""
  fields = dict(values)
  return saved.decode(getattr(events, fields.pop("type")), fields)


def _parse(text: str, number: int, path: pathlib.Path) -> dict[str, Any]:
  try:
    values = json.loads(text)
  except ValueError as error:
    raise TapeError(f"{path}, line {number} is no JSON: {error}") from error
  if not isinstance(values, dict):
    raise TapeError(f"{path}, line {number} is no JSON object")
  return values


def _dump(values: Any) -> str:
  try:
    return json.dumps(values, separators=(",", ":"), allow_nan=False)
  except ValueError:  # A norm that is not finite, which JSON has no word for.
    return json.dumps(
      saved.encode(values), separators=(",", ":"), allow_nan=False
    )


def _cut_torn_line(path: pathlib.Path) -> None:
  """Drops what a killed syncer left of its last line."""
  if not path.exists():
    return
  with path.open("rb+") as file:
    end = file.seek(0, os.SEEK_END)
    while end > 0:
      file.seek(end - 1)
      if file.read(1) == b"\n":
        break
      end -= 1
    file.truncate(end)
