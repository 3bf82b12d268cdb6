"""Reads a run's tapes into a History, by stepping the state machine once more.

The tape has what the machine consumed; what it decided, it decides again. So a
report and a replay can never disagree.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterable

from ddiloco_jax.protocol import events, machine, status, tape
from ddiloco_jax.report.history import History, Life, Merge, Progress


def read_history(run_dir: pathlib.Path) -> History:
  """The history of a run, from all of its tapes.

  Raises:
    ValueError: there is no tape, or one is damaged before its last line.
  """
  chronicle = Chronicle()
  reader: tape.Reader | None = None
  for path in tapes_of(run_dir):
    reader = tape.Reader(path)
    for line in reader.lines():
      assert reader.start is not None
      chronicle.begin(reader.start)
      chronicle.note(line.event, line.effects, line.state)
    assert reader.start is not None
    chronicle.begin(reader.start)
  assert reader is not None
  assert reader.state is not None
  return chronicle.history(reader.run_id, reader.state)


class Chronicle:
  """Notes lives and merges, event by event, over all epochs of a run.

  A restored syncer goes on from a checkpoint; what came after it is rolled
  back, and forgotten here as it is in the books.
  """

  def __init__(self):
    self.end_s = 0.0
    self.ending = ""
    self._epoch = 0
    self._ended = False
    self._lives: dict[tuple[str, int], Life] = {}
    self._progress: dict[tuple[str, int], list[Progress]] = {}
    # The steps of a process count on where it takes another's place, or goes on
    # from a snapshot: where a life began, and the newest step told.
    self._begun: dict[tuple[str, int], int] = {}
    self._told: dict[str, int] = {}
    self._merges: list[Merge] = []

  def begin(self, start: machine.State) -> None:
    """Goes on from the first state of an epoch; again: does nothing."""
    if start.epoch == self._epoch:
      return
    self._epoch = start.epoch
    self._merges = _published(self._merges, start)
    lives = {  # Later incarnations are given anew.
      who: dataclasses.replace(life, end_s=min(life.end_s, start.now))
      for who, life in self._lives.items()
      if life.incarnation < start.next_incarnation
    }
    self._lives = lives
    self._begun = {k: v for k, v in self._begun.items() if k in lives}
    self._progress = {
      who: [p for p in self._progress.get(who, ()) if p.time_s <= start.now]
      for who in lives
    }
    self._ended = start.end is not None
    self.ending = "" if start.end is None else start.end.reason
    self.end_s = min(self.end_s, start.now)

  def note(
    self,
    event: events.Event,
    effects: Iterable[events.Effect],
    state: machine.State,
  ) -> None:
    """Takes one step of the machine: its event, its decisions, its new state."""
    if not self._ended:
      self.end_s = event.time
    if isinstance(event, events.LearnerEvent):
      self._hear(event)
    for effect in effects:
      match effect:
        case events.Welcome():
          self._welcome(effect, event.time)
        case events.Fence():
          self._end(effect.learner, effect.incarnation, "lost")
        case events.Merge():
          self._merges.append(_merge(effect, event.time, state))
        case events.Ending():
          self._ended, self.ending = True, effect.reason
        case events.Finished():
          self.ending = effect.reason
          self._finish(state)

  def history(self, run_id: str, state: machine.State) -> History:
    """All of it, with the books of the newest state."""
    view = status.status(state, self.end_s)
    return History(
      run_id=run_id,
      cycle_steps=state.rules.cycle_steps,
      end_s=self.end_s,
      lives=tuple(
        dataclasses.replace(
          life,
          end=life.end or "run",
          progress=tuple(self._progress.get(who, ())),
        )
        for who, life in sorted(self._lives.items())
      ),
      merges=tuple(_published(self._merges, state)),
      realised_h=tuple(f.realised_h or None for f in view.fragments),
      books={book.name: book.tokens for book in view.books},
      counters=dict(view.counters),
      ending=self.ending,
    )

  def _welcome(self, effect: events.Welcome, time_s: float) -> None:
    who = effect.learner, effect.incarnation
    if who in self._lives:  # A reconnect: the same process goes on.
      life = dataclasses.replace(self._lives[who], end="", end_s=time_s)
    else:
      life = Life(
        learner=effect.learner,
        incarnation=effect.incarnation,
        start_s=time_s,
        end_s=time_s,
        end="",  # While it goes on.
      )
    self._lives[who] = life

  def _hear(self, event: events.LearnerEvent) -> None:
    who = event.learner, event.incarnation
    life = self._lives.get(who)
    if life is None or life.end:
      return
    self._lives[who] = dataclasses.replace(life, end_s=event.time)
    match event:
      case events.Left():
        self._end(*who, "left")
      case events.Disconnected():
        self._end(*who, "lost")
      case events.Applied() if who not in self._begun:
        self._told[who[0]] = max(event.step, self._told.get(who[0], 0))
      case events.Reported():
        loss = dict(event.metrics).get("loss")
        finite = loss is not None and math.isfinite(loss)
        self._progress.setdefault(who, []).append(
          Progress(
            event.time, self._step(who, event.step), loss if finite else None
          )
        )

  def _step(self, who: tuple[str, int], step: int) -> int:
    """Steps of this life, of one that reports `step`."""
    if who not in self._begun:
      goes_on = 0 < self._told.get(who[0], 0) < step
      self._begun[who] = step - 1 if goes_on else 0
    self._told[who[0]] = step
    return step - self._begun[who]

  def _end(self, learner: str, incarnation: int, how: str) -> None:
    life = self._lives.get((learner, incarnation))
    if life is not None and not life.end:
      self._lives[learner, incarnation] = dataclasses.replace(life, end=how)

  def _finish(self, state: machine.State) -> None:
    """Who fell silent and never came back was lost when last heard."""
    for learner in state.learners.values():
      how = "run" if learner.live else "lost"
      self._end(learner.learner, learner.incarnation, how)


def _published(merges: list[Merge], state: machine.State) -> list[Merge]:
  """Those whose version a state has: the others were rolled back, or run."""
  return [m for m in merges if m.n <= state.fragments[m.fragment].version.n]


def _merge(effect: events.Merge, time_s: float, state: machine.State) -> Merge:
  return Merge(
    time_s=time_s,
    t=state.t,
    fragment=effect.fragment,
    n=effect.version.n,
    contributors=tuple(
      (item.key.learner, item.key.incarnation) for item in effect.inputs
    ),
    num_live=state.num_live,
  )


def tapes_of(run_dir: pathlib.Path) -> list[pathlib.Path]:
  """The tapes of a run, in the order of its epochs.

  A syncer that ended as it started has left one that is empty or torn: no
  epoch began with it.

  Raises:
    ValueError: there is none.
  """
  old = [p for p in run_dir.glob("tape.*.jsonl") if _epoch(p) is not None]
  paths = sorted(old, key=lambda path: _epoch(path) or 0)
  newest = run_dir / "tape.jsonl"
  paths += [newest] if newest.exists() else []
  if not paths:
    raise ValueError(
      f"{run_dir} has no tape.jsonl: it must be the directory of a run whose"
      " syncer was started"
    )
  begun = [path for path in paths if tape.has_header(path)]
  if not begun:
    raise ValueError(
      f"no tape of {run_dir} has a whole header: its syncer was killed as it"
      " started; start it again"
    )
  return begun


def _epoch(path: pathlib.Path) -> int | None:
  number = path.name.split(".")[1]
  return int(number) if number.isdecimal() else None
