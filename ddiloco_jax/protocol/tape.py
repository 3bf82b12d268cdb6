"""The tape: every event the machine consumed, with a digest of its decisions.

One JSON object a line: a header at every start of a syncer, then the events.
Re-stepping the machine over it must decide the same. (arXiv 2604.21428, App.)
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from ddiloco_jax.protocol import events, machine, saved
from ddiloco_jax.protocol.lines import (
  End,
  Head,
  Step,
  decode_event,
  dump,
  parse,
)
from ddiloco_jax.protocol.state import State

FORMAT = 5  # Raised with `machine.FORMAT`: a header has a state.
# A digest of the whole state costs about a millisecond: not on every line.
STATE_DIGEST_EVERY = 1000


class TapeError(ValueError):
  """A tape that cannot be read: what is wrong with it, and where."""


def header(
  state: State,
  *,
  run_id: str = "",
  machine_type: str = "",
  libraries: dict[str, str] | None = None,
  settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
  """The first line of an epoch: all that its replay starts from.

  Args:
    machine_type: Where the tensors are merged; bits may differ on another.
    libraries: Versions of those that do it.
    settings: The run's, as JSON values.
  """
  return {
    "tape": FORMAT,
    "run_id": run_id,
    "epoch": state.epoch,
    "machine": machine_type,
    "libraries": libraries or {},
    "settings": settings or {},
    "rules": saved.encode(state.rules),
    "start": machine.save(state),
  }


def digest(effects: tuple[events.Effect, ...]) -> str:
  """A name of what was decided, reasons included; "" for nothing."""
  if not effects:
    return ""
  text = dump([events.to_dict(effect) for effect in effects])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


class TapeWriter:
  """Appends to a tape; a line is written whole before `append` returns."""

  def __init__(self, path: str | os.PathLike[str], head: dict[str, Any]):
    self._path = pathlib.Path(path)
    _cut_torn_line(self._path)
    # Line buffered: a killed syncer loses at most the line being written.
    self._file = self._path.open("a", encoding="utf-8", buffering=1)
    self._file.write(dump(head) + "\n")
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
    if merges := _merges(effects):
      line["merges"] = merges
    self._num_events += 1
    if self._num_events % STATE_DIGEST_EVERY == 0:
      line["state"] = machine.digest(state)
    self._file.write(dump(line) + "\n")

  def close(self, state: State) -> None:
    """Ends the tape of this epoch with a digest of the last state."""
    end = {"end": self._num_events, "state": machine.digest(state)}
    with self._file:
      self._file.write(dump(end) + "\n")

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


def has_header(path: str | os.PathLike[str]) -> bool:
  """Whether an epoch began with this tape: its first line is whole."""
  with pathlib.Path(path).open("rb") as file:
    return file.readline().endswith(b"\n")


class Reader:
  """Reads a tape; its attributes are true of what `lines` has yielded.

  Attributes:
    start: The state that the newest epoch began with.
    state: The newest state.
    run_id: As the newest header says.
    head: The newest header.
    num_epochs: Headers so far.
    fault: How an end line differs from what was read; "" if none does.
    torn: The last line is not whole, or the first was never written.
    closed: An end line was the last.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = pathlib.Path(path)
    self.start: State | None = None
    self.state: State | None = None
    self.run_id = ""
    self.head: Head | None = None
    self.num_epochs = 0
    self.fault = ""
    self.torn = False
    self.closed = False
    self._number = 0  # Of the line.
    self._num_events = 0  # Of this epoch.

  def lines(self) -> Iterator[Line]:
    """Every event, re-stepped.

    Raises:
      TapeError: The file is no tape, or is damaged before its last line.
      OSError: It cannot be read.
    """
    with self.path.open("rb") as file:
      for self._number, text in enumerate(file, start=1):
        if not text.endswith(b"\n"):
          self.torn = True
          break
        with self._naming_the_line():
          line = self._read(parse(text))
        if line is not None:
          yield line
    if self.state is None:
      self.torn = True
      raise TapeError(
        f"{self.path} is no tape: it has {self._number} lines and no whole "
        "header; give the tape.jsonl of a run directory"
      )

  def _read(self, values: dict[str, Any]) -> Line | None:
    if "tape" in values:
      self._start(values)
    elif self.state is None:
      raise ValueError("a tape begins with a header, and this is none")
    elif self.closed:
      raise ValueError("only a header may follow an end line")
    elif "end" in values:
      self._end(saved.decode(End, values))
    else:
      return self._step(saved.decode(Step, values))
    return None

  def _start(self, values: dict[str, Any]) -> None:
    if values["tape"] != FORMAT:
      raise ValueError(
        f"tape format {values['tape']!r}, and this release reads {FORMAT}; "
        "replay it with the release that wrote it"
      )
    head = saved.decode(Head, values)
    self.state = self.start = machine.load(head.rules, head.start)
    self.head, self.run_id, self.closed = head, head.run_id, False
    self.num_epochs += 1
    self._num_events = 0

  def _step(self, line: Step) -> Line:
    assert self.state is not None
    event = decode_event(line.event)
    kind = type(event).__name__
    try:
      self.state, effects = machine.step(self.state, event)
    except Exception as error:  # No syncer takes such an event, or header.
      raise ValueError(
        f"{kind} cannot follow on the lines before: {error!r}"
      ) from error
    self._num_events += 1
    fault, found = "", digest(effects)
    if found != line.digest:
      kinds = ", ".join(type(e).__name__ for e in effects) or "nothing"
      fault = (
        f"line {self._number}: {kind} decided {found!r} ({kinds}) and the tape "
        f"says {line.digest!r}"
      )
    elif line.merges != _as_read(_merges(effects)):
      fault = f"line {self._number}: other merges are written than decided"
    elif line.state:
      fault = self._compare(line.state)
    return Line(self._number, event, effects, self.state, fault)

  def _end(self, line: End) -> None:
    self.closed = True
    fault = self._compare(line.state)
    if line.end != self._num_events:
      fault = (
        f"line {self._number}: the end line counts {line.end} events of its "
        f"epoch, and {self._num_events} were read"
      )
    self.fault = self.fault or fault

  def _compare(self, expected: str) -> str:
    assert self.state is not None
    found = machine.digest(self.state)
    if found == expected:
      return ""
    return (
      f"line {self._number}: the state's digest is {found[:16]} and the tape "
      f"says {expected[:16]}"
    )

  @contextlib.contextmanager
  def _naming_the_line(self) -> Iterator[None]:
    """Makes a fault of one line a TapeError: where, what, and the way on."""
    try:
      yield
    except ValueError as error:
      fix = "give the tape.jsonl of a run directory"
      if self._number > 1:
        fix = (
          f"replay what comes before it (head -n {self._number - 1}), or "
          "another copy of the tape"
        )
      raise TapeError(
        f"{self.path}, line {self._number}: {error}; {fix}"
      ) from error


def _merges(effects: tuple[events.Effect, ...]) -> list[dict[str, Any]]:
  return [events.to_dict(e) for e in effects if type(e) is events.Merge]


def _as_read(values: list[dict[str, Any]]) -> tuple[Any, ...]:
  """Values as they come back from a line."""
  return tuple(json.loads(dump(values))) if values else ()


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
