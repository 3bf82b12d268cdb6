"""Does a plan of faults to real processes, and writes down what it did.

Without any privilege: signals, the relay that each learner's connections pass,
and the limit on the size of files, which fails a process's writes as a full
disk does (the error is EFBIG, not ENOSPC). Kills and starts are the run's own
(`launch/run.py`); here they are only seen.

A wall clock cannot be set by one user for one process, so learners of a storm
are started by `launch/jumping.py`, which shifts what Python's own clock says.
"""

import contextlib
import json
import pathlib
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco_jax.chaos.plan import SYNCER, Fault, Kind, to_dict
from ddiloco_jax.launch import failures, jumping, plan
from ddiloco_jax.launch.children import Child
from ddiloco_jax.launch.relay import Relay

FILE = "faults.jsonl"


def kills_of(faults: Sequence[Fault]) -> tuple[failures.Kill, ...]:
  """The kills of a plan, for the run that does them; times are its elapsed_s."""
  return tuple(
    failures.Kill(
      process=name_of(fault.target),
      when=failures.Moment(fault.at_s, "s"),
      restart=failures.Moment(fault.end_s, "s"),
    )
    for fault in faults
    if fault.kind is Kind.KILL
  )


def name_of(target: int) -> str:
  """The process that a fault hits."""
  return plan.SYNCER if target == SYNCER else plan.learner_name(target)


class Record:
  """RUN_DIR/faults.jsonl: a line for all that was done, or happened.

  Every line has `at_s`, seconds since the storm began, and `what`.
  """

  def __init__(self, run_dir: pathlib.Path):
    self._file = (run_dir / FILE).open("w", encoding="utf-8", buffering=1)

  def write(self, what: str, at_s: float, **values: Any) -> None:
    line = {"what": what, "at_s": round(at_s, 4), **values}
    self._file.write(json.dumps(line, allow_nan=False) + "\n")

  def close(self) -> None:
    self._file.close()


class Injector:
  """The faults that are not kills, begun and ended in time.

  Args:
    faults: The plan, in order of time.
    children: The run's processes by name.
    relays: Learner -> its way to the syncer.
    jumps: Where learners wait for a jump of their clock.
    record: Told of every fault and of every start and end of a process.
    say: Takes a line for people.
  """

  def __init__(
    self,
    faults: Sequence[Fault],
    children: Mapping[str, Child],
    relays: Sequence[Relay],
    jumps: pathlib.Path,
    record: Record,
    say: Callable[[str], None],
  ):
    self._coming = list(faults)
    self._active: list[Fault] = []
    self._children = children
    self._relays = relays
    self._jumps = jumps
    self._record = record
    self._say = say
    self._seen = {name: (0, False) for name in children}

  @property
  def active(self) -> tuple[Fault, ...]:
    return tuple(self._active)

  def advance(self, now_s: float) -> None:
    """Ends what is over, begins what is due, and notes starts and ends."""
    for fault in [f for f in self._active if f.end_s <= now_s]:
      self._end(fault, now_s)
    while self._coming and self._coming[0].at_s <= now_s:
      self._begin(self._coming.pop(0), now_s)
    self._watch(now_s)

  def heal(self, now_s: float) -> None:
    """Ends all that is under way, and begins nothing more."""
    self._coming.clear()
    for fault in list(self._active):
      self._end(fault, now_s)

  def _begin(self, fault: Fault, now_s: float) -> None:
    name = name_of(fault.target)
    child = self._children[name]
    is_there = fault.kind is Kind.KILL or child.is_running
    self._record.write(
      "fault", now_s, process=name, done=is_there, fault=to_dict(fault)
    )
    if fault.kind is Kind.KILL or not is_there:
      return
    self._say(f"{now_s:6.1f} s  {name}: {describe(fault)}")
    self._active.append(fault)
    relay = self._relays[fault.target]
    match fault.kind:
      case Kind.STOP:
        child.signal(signal.SIGSTOP)
      case Kind.PARTITION:
        relay.hold()
        if fault.half_open:
          relay.half_open()
      case Kind.SLOW:
        relay.shape(fault.latency_s, fault.bytes_per_s)
      case Kind.DISK:
        _limit_files(child, is_full=True)
      case Kind.CLOCK:
        jumping.jump(child.pid, self._jumps, fault.jump_s)

  def _end(self, fault: Fault, now_s: float) -> None:
    self._active.remove(fault)
    child = self._children[name_of(fault.target)]
    relay = self._relays[fault.target]
    match fault.kind:
      case Kind.STOP:
        child.signal(signal.SIGCONT)
      case Kind.PARTITION:
        relay.release()
      case Kind.SLOW:
        relay.shape()
      case Kind.DISK:
        _limit_files(child, is_full=False)
      case Kind.CLOCK:
        jumping.jump(child.pid, self._jumps, -fault.jump_s)
    self._record.write("fault_over", now_s, process=child.name)

  def _watch(self, now_s: float) -> None:
    for name, child in self._children.items():
      life, ended = self._seen[name]
      if child.num_starts > life:
        self._record.write("start", now_s, process=name, life=child.num_starts)
        self._seen[name] = (child.num_starts, False)
      elif life and not ended and not child.is_running:
        self._record.write(
          "end",
          now_s,
          process=name,
          life=life,
          code=child.exit_code,
          killed=child.was_killed,
        )
        self._seen[name] = (life, True)


def describe(fault: Fault) -> str:
  """A fault in a few words."""
  lasts = f"for {fault.lasts_s:.1f} s"
  match fault.kind:
    case Kind.KILL:
      return f"killed, down {lasts}"
    case Kind.STOP:
      return f"stopped {lasts}"
    case Kind.PARTITION:
      how = "half-open" if fault.half_open else "partitioned"
      return f"{how} {lasts}"
    case Kind.SLOW:
      return (
        f"{1000 * fault.latency_s:.0f} ms and"
        f" {fault.bytes_per_s / 1000:.0f} kB/s {lasts}"
      )
    case Kind.DISK:
      return f"no disk {lasts}"
    case Kind.CLOCK:
      return f"clock jumps {fault.jump_s:+.0f} s {lasts}"


def _limit_files(child: Child, *, is_full: bool) -> None:
  """Sets the soft limit of a running process, and leaves the hard one."""
  if child.is_running and child.pid is not None:
    with contextlib.suppress(ProcessLookupError):
      _, hard = resource.prlimit(child.pid, resource.RLIMIT_FSIZE)
      soft = 0 if is_full else hard
      resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (soft, hard))
