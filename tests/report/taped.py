"""A run in virtual time that writes its tape, as a syncer does."""

import pathlib
from collections.abc import Sequence
from typing import Any

from ddiloco_jax.protocol import events, machine, tape
from ddiloco_jax.protocol.rules import Rules
from tests.protocol import driver


class Taped(driver.Run):
  """Writes a tape.

  Args:
    path: Of the tape.
    rules: Of the run.
    learners: Of this epoch; `start_at` is a time of the run.
    saved: What `machine.save` returned, to restore from.
  """

  def __init__(
    self,
    path: pathlib.Path,
    rules: Rules,
    learners: Sequence[driver.Learner],
    saved: dict[str, Any] | None = None,
  ):
    super().__init__(rules, learners)
    if saved is not None:
      self.state = machine.restore(rules, saved)
      self.now = self.state.now
    self.saves: dict[float, dict[str, Any]] = {}
    self.tape = tape.TapeWriter(path, tape.header(self.state, run_id="r1"))

  def tell(self, event: events.Event) -> None:
    num_effects, before = len(self.effects), self.state
    super().tell(event)
    effects = tuple(self.effects[num_effects:])
    assert self.state is not before
    self.tape.append(self.events[-1], effects, self.state)

  def save_at(self, time: float) -> None:
    """Keeps a checkpoint of that moment in `saves`."""
    self.at(time, lambda: self.saves.update({time: machine.save(self.state)}))
