"""Which process is killed when, and when it comes back: `--kill` as data."""

import dataclasses
import re
from typing import NamedTuple

from ddiloco_jax.launch import plan

_MOMENT = re.compile(r"(\d+(?:\.\d+)?)(s|%)?")
_FORM = "LEARNER@TIME[:RESTART], such as 1@33%:66% or 0@20s:35s"


class Progress(NamedTuple):
  """How far a run is.

  Attributes:
    elapsed_s: Seconds since the syncer began to serve.
    t: The syncer's step.
    num_syncer_steps: The step at which the run ends; 0 if nothing says.
  """

  elapsed_s: float
  t: int = 0
  num_syncer_steps: int = 0


class Moment(NamedTuple):
  """A point of a run: seconds, or per cent of its syncer steps."""

  value: float
  unit: str

  def is_past(self, progress: Progress) -> bool:
    """Whether the run has come so far; never, per cent of an unknown end."""
    if self.unit == "s":
      return progress.elapsed_s >= self.value
    end = progress.num_syncer_steps
    return end > 0 and 100.0 * progress.t >= self.value * end

  def __str__(self) -> str:
    return f"{self.value:g}{self.unit}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
  """SIGKILL for one process, and perhaps a start later.

  Attributes:
    process: The process's name in the plan.
    when: When it is killed.
    restart: When it is started again; None leaves that to the policy.
  """

  process: str
  when: Moment
  restart: Moment | None = None


def parse_kill(text: str, num_learners: int) -> Kill:
  """Reads one `--kill` flag.

  Args:
    text: LEARNER@TIME[:RESTART]; LEARNER is an id, or "syncer"; a time is
      seconds ("20" or "20s") or a share of the run's syncer steps ("33%").
    num_learners: How many learners the run has.

  Raises:
    ValueError: the text is no such thing, or names no learner of the run.
  """
  target, at, times = text.partition("@")
  when_text, colon, restart_text = times.partition(":")
  if not (target and at and when_text) or (colon and not restart_text):
    raise ValueError(f"--kill={text}: expected {_FORM}")
  when = _parse_moment(when_text, text)
  restart = _parse_moment(restart_text, text) if colon else None
  if restart and restart.unit == when.unit and restart.value <= when.value:
    raise ValueError(
      f"--kill={text}: the restart at {restart} is not after the kill at {when}"
    )
  if target == plan.SYNCER and restart and restart.unit == "%":
    raise ValueError(
      f"--kill={text}: without a syncer the run's share does not grow; give the"
      " restart of the syncer in seconds"
    )
  return Kill(
    process=_parse_target(target, text, num_learners),
    when=when,
    restart=restart,
  )


def check_ends(kills: tuple[Kill, ...], num_syncer_steps: int) -> None:
  """Raises ValueError if a kill is in per cent of a run without an end."""
  for kill in kills:
    units = {kill.when.unit, kill.restart.unit if kill.restart else "s"}
    if "%" in units and num_syncer_steps <= 0:
      raise ValueError(
        f"--kill of {kill.process} is in per cent, but the run has no"
        " sync.num_syncer_steps to take it of; give seconds"
      )


def _parse_target(target: str, text: str, num_learners: int) -> str:
  if target == plan.SYNCER:
    return target
  if not target.isdecimal() or int(target) >= num_learners:
    raise ValueError(
      f"--kill={text}: there is no learner {target!r}; the learners of this"
      f" run are 0 to {num_learners - 1}, and there is {plan.SYNCER!r}"
    )
  return plan.learner_name(int(target))


def _parse_moment(value: str, text: str) -> Moment:
  match = _MOMENT.fullmatch(value)
  if match is None:
    raise ValueError(f"--kill={text}: {value!r} is no time; expected {_FORM}")
  moment = Moment(float(match[1]), match[2] or "s")
  if moment.unit == "%" and moment.value > 100:
    raise ValueError(f"--kill={text}: {value} is beyond the run's end, 100%")
  return moment
