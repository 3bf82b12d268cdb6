"""What a storm's run went through, from its tapes and faults.jsonl alone.

Times here are seconds since the storm began. A tape has the run's own clock,
which stands still while no syncer runs; faults.jsonl says, for each epoch, how
far apart the two are (both are clocks of one machine).
"""

import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

from ddiloco_jax.protocol import events, status, tape
from ddiloco_jax.protocol.state import State
from ddiloco_jax.report import chronicle
from ddiloco_jax.report.history import Progress


class Line(NamedTuple):
  """A line of faults.jsonl."""

  what: str
  at_s: float
  values: dict[str, Any]


class Join(NamedTuple):
  """A welcome: a process joined, or came back to a syncer."""

  at_s: float
  epoch: int
  learner: str
  nonce: str


class Merged(NamedTuple):
  """A merge: when it was decided, from whom, of whom."""

  at_s: float
  epoch: int
  fragment: int
  n: int
  contributors: tuple[tuple[str, str], ...]  # (learner, nonce)
  members: tuple[str, ...]


class Published(NamedTuple):
  """A version that was there to fetch."""

  at_s: float
  epoch: int
  fragment: int
  n: int


class Live(NamedTuple):
  """How many learners were live from then on."""

  at_s: float
  epoch: int
  num: int


@dataclasses.dataclass(slots=True)
class Ordeal:
  """Everything that a verdict is drawn from.

  Attributes:
    lines: faults.jsonl.
    starts: Epoch -> the version n of each fragment that it began with.
    progress: (learner, nonce) -> its reports.
    step_s: The learners' step time, at each merge.
    state: The last state.
  """

  lines: list[Line]
  starts: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
  joins: list[Join] = dataclasses.field(default_factory=list)
  merges: list[Merged] = dataclasses.field(default_factory=list)
  published: list[Published] = dataclasses.field(default_factory=list)
  live: list[Live] = dataclasses.field(default_factory=list)
  progress: dict[tuple[str, str], list[Progress]] = dataclasses.field(
    default_factory=dict
  )
  step_s: list[float] = dataclasses.field(default_factory=list)
  state: State | None = None

  def of(self, what: str) -> list[Line]:
    """The lines of one kind."""
    return [line for line in self.lines if line.what == what]

  @property
  def end_s(self) -> float:
    """When the storm was over."""
    over = self.of("over")
    if not over:
      raise ValueError(
        "faults.jsonl has no line that the storm was over: it was ended before"
      )
    return over[0].at_s


def read_lines(path: pathlib.Path) -> list[Line]:
  """faults.jsonl.

  Raises:
    ValueError: it is not there, or a line is none.
  """
  try:
    found = [json.loads(text) for text in path.read_text("utf-8").splitlines()]
  except OSError as error:
    raise ValueError(
      f"{path} cannot be read ({error.strerror}): give the directory of a run"
      " of ddiloco_jax.cli.storm"
    ) from error
  return [Line(x.pop("what"), x.pop("at_s"), x) for x in found]


def read_ordeal(run_dir: pathlib.Path) -> Ordeal:
  """Reads the records of a storm.

  Raises:
    ValueError: a tape or faults.jsonl is missing or damaged.
  """
  ordeal = Ordeal(read_lines(run_dir / "faults.jsonl"))
  offsets: dict[int, float] = {}
  for line in ordeal.of("clock"):  # The least is the truest: nothing waited.
    epoch, offset_s = line.values["epoch"], line.values["offset_s"]
    offsets[epoch] = min(offset_s, offsets.get(epoch, offset_s))
  for path in chronicle.tapes_of(run_dir):
    reader = tape.Reader(path)
    for line in reader.lines():
      _note(ordeal, offsets, line)
    if reader.state is not None:
      _begin(ordeal, reader.state)
      ordeal.state = reader.state
  return ordeal


def _begin(ordeal: Ordeal, state: State) -> None:
  ordeal.starts.setdefault(state.epoch, state.starts[state.epoch - 1])


def _note(ordeal: Ordeal, offsets: dict[int, float], line: tape.Line) -> None:
  state, event = line.state, line.event
  epoch = state.epoch
  _begin(ordeal, state)
  if epoch not in offsets:
    return  # So short that the storm never saw it.
  at_s = event.time + offsets[epoch]
  if isinstance(event, events.Merged):
    ordeal.published.append(
      Published(at_s, epoch, event.fragment, event.version.n)
    )
  if isinstance(event, events.Reported):
    learner = state.learners.get(event.learner)
    if learner is not None and learner.incarnation == event.incarnation:
      reports = ordeal.progress.setdefault((event.learner, learner.nonce), [])
      reports.append(Progress(at_s, event.step, None))
  for effect in line.effects:
    if isinstance(effect, events.Welcome):
      ordeal.joins.append(Join(at_s, epoch, effect.learner, effect.nonce))
    if isinstance(effect, events.Merge):
      ordeal.merges.append(_merge(effect, at_s, state))
      if state.step_s:
        ordeal.step_s.append(state.step_s)
  if not ordeal.live or ordeal.live[-1][1:] != (epoch, state.num_live):
    ordeal.live.append(Live(at_s, epoch, state.num_live))


def _merge(effect: events.Merge, at_s: float, state: State) -> Merged:
  members = next(
    (r.members for r in state.rounds if r.fragment == effect.fragment), ()
  )
  return Merged(
    at_s,
    state.epoch,
    effect.fragment,
    effect.version.n,
    tuple(
      (i.key.learner, state.learners[i.key.learner].nonce)
      for i in effect.inputs
      if i.key.learner in state.learners
    ),
    tuple(member.learner for member in members),
  )


def is_balanced(state: State) -> bool:
  """reported = merged + discarded + pending, per learner and fragment."""
  for learner in state.learners:
    for p in range(state.rules.num_fragments):
      totals = status.account_totals(state, learner, p)
      parts = (totals.merged, totals.pending, *(c for _, c in totals.discarded))
      for i in range(2):
        if totals.reported[i] != sum(part[i] for part in parts):
          return False
  return True
