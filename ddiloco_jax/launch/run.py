"""A run of real processes: start, kill on plan, restart by policy, stop.

`advance` is called a few times a second and takes the time as an argument; it
starts and reaps, and waits for nothing. A learner that fails does not end the
run: the others train on, which is the point of the algorithm. It is named, and
the run's exit code tells of it.
"""

import dataclasses
import pathlib
import signal
import time
from collections.abc import Callable, Sequence

from ddiloco_jax.launch import exits
from ddiloco_jax.launch.children import Child, describe_exit
from ddiloco_jax.launch.failures import Kill, Moment, Progress
from ddiloco_jax.launch.plan import SYNCER, Process

RESTARTS = ("never", "always")
# Starting again would end the same way.
_FINAL_CODES = (exits.BAD_USAGE, exits.FENCED, exits.IN_USE)

# A learner that was told of the end needs no signal; one that never joined
# does.
_FAREWELL_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
  """How a run of processes is kept going, and ended.

  Attributes:
    restart: "always" starts again what failed, "never" does not; a planned
      kill with a restart of its own comes back either way.
    start_timeout_s: The syncer must serve by then.
    first_pause_s: Before a failed process is started again; doubles with
      every life of under 30 s, at most a minute.
    max_quick_failures: So many such lives in a row are a failure for good.
    finish_grace_s: What learners have to end after the syncer ended.
    alone_grace_s: What the syncer has to end after the last learner did.
    flush_grace_s: What a syncer that is told to stop has to end the run, before
      its learners are told, too.
    stop_grace_s: What all have to end after SIGTERM; then SIGKILL.
  """

  restart: str = "never"
  start_timeout_s: float = 180.0
  first_pause_s: float = 1.0
  max_quick_failures: int = 5
  finish_grace_s: float = 20.0
  alone_grace_s: float = 10.0
  flush_grace_s: float = 20.0
  stop_grace_s: float = 45.0

  def __post_init__(self):
    if self.restart not in RESTARTS:
      raise ValueError(
        f"--restart={self.restart}: expected one of {', '.join(RESTARTS)}"
      )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
  """A process that ended badly, and not by plan."""

  name: str
  code: int
  log: pathlib.Path
  last_lines: str

  def __str__(self) -> str:
    return (
      f"{self.name} {describe_exit(self.code)}; the end of {self.log}:\n"
      + "\n".join(f"  | {line}" for line in self.last_lines.splitlines())
    )


class Run:
  """The processes of one run.

  Args:
    processes: The plan, the syncer first.
    run_dir: Logs go under it; the syncer writes `address` there.
    cfg: The policy.
    kills: Planned failures.
    say: Takes one line per event of interest.
  """

  def __init__(
    self,
    processes: Sequence[Process],
    run_dir: pathlib.Path,
    cfg: LaunchConfig,
    kills: Sequence[Kill] = (),
    say: Callable[[str], None] = print,
  ):
    logs = run_dir / "logs"
    self.children = {p.name: Child(p, logs) for p in processes}
    self.failures: list[Failure] = []
    self.address = ""
    self._run_dir = run_dir
    self._cfg = cfg
    self._kills = list(kills)
    self._say = say
    self._returns: dict[str, Moment] = {}
    self._quick_failures: dict[str, int] = {}
    self._reaped: dict[str, int] = {}
    self._grace_ends: float | None = None
    self._is_stopping = False

  @property
  def address_path(self) -> pathlib.Path:
    """Written by the syncer, each time that it serves."""
    return self._run_dir / "address"

  @property
  def syncer(self) -> Child:
    return self.children[SYNCER]

  @property
  def learners(self) -> list[Child]:
    return [c for c in self.children.values() if c is not self.syncer]

  def start_syncer(self, is_cancelled: Callable[[], bool]) -> bool:
    """Starts the syncer and waits until it serves; False if it does not.

    Raises:
      BadUsage: the run's directory cannot be written to.
    """
    path = self.address_path
    before = path.stat().st_mtime_ns if path.exists() else None
    with exits.writing_to(self._run_dir):
      self.syncer.start()
    deadline = time.monotonic() + self._cfg.start_timeout_s
    while self.syncer.is_running and not is_cancelled():
      if path.exists() and path.stat().st_mtime_ns != before:
        self.address = path.read_text(encoding="utf-8").strip()
        if self.address:
          return True
      if time.monotonic() > deadline:
        self._say(
          f"the syncer did not serve within {self._cfg.start_timeout_s:g} s"
        )
        self._fail(self.syncer, exits.FAILED)
        return False
      time.sleep(0.05)
    self._reap(Progress(0.0))
    return False

  def start_learners(self) -> None:
    """Starts every learner; the syncer serves."""
    for learner in self.learners:
      learner.start(self.address)

  def advance(self, progress: Progress) -> bool:
    """Does what is due; True once nothing runs and nothing will return."""
    self._kill_due(progress)
    self._reap(progress)
    self._return_due(progress)
    self._end_what_is_left(progress)
    running = any(c.is_running for c in self.children.values())
    return not running and not self._returns

  def stop(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
    """SIGTERM to the syncer, then to the rest; SIGKILL when time is up.

    Args:
      is_hurried: Asked while it waits; True skips what is left of the waits.
    """
    self._is_stopping = True
    self._returns.clear()
    # The syncer ends the run: what learners have done is merged once more, and
    # they end by themselves. Told first, they would take it with them.
    self.syncer.signal(signal.SIGTERM)
    if self._await([self.syncer], self._cfg.flush_grace_s, is_hurried):
      farewell_s = min(_FAREWELL_S, self._cfg.finish_grace_s)
      self._await(self.learners, farewell_s, is_hurried)
    for learner in self.learners:
      learner.signal(signal.SIGTERM)
    everybody = [self.syncer, *self.learners]
    if not self._await(everybody, self._cfg.stop_grace_s, is_hurried):
      self._kill_the_rest()
    self._reap(Progress(0.0))

  def _await(
    self,
    children: Sequence[Child],
    timeout_s: float,
    is_hurried: Callable[[], bool],
  ) -> bool:
    """Whether all of them end in time."""
    deadline = time.monotonic() + timeout_s
    while any(child.is_running for child in children):
      if time.monotonic() > deadline or is_hurried():
        return False
      time.sleep(0.05)
    return True

  def exit_code(self) -> int:
    """The syncer's failure if it failed, else the first one, else 0."""
    codes = [f.code for f in self.failures if f.name == SYNCER]
    codes += [f.code for f in self.failures]
    return max(codes[0], exits.FAILED) if codes else exits.OK

  def states(self) -> dict[str, str]:
    """Process name -> what it does, in a word or two."""
    return {name: self._state(child) for name, child in self.children.items()}

  def _state(self, child: Child) -> str:
    if child.is_running:
      return "runs"
    if child.name in self._returns:
      return f"down, returns at {self._returns[child.name]}"
    if child.exit_code is None:
      return "not started"
    if child.was_killed:
      return "killed"
    return "ended" if child.exit_code == 0 else describe_exit(child.exit_code)

  def _kill_due(self, progress: Progress) -> None:
    due = [k for k in self._kills if k.when.is_past(progress)]
    for kill in due:
      self._kills.remove(kill)
      child = self.children[kill.process]
      if not child.is_running:
        self._say(f"{child.name} was to be killed, but does not run")
        continue
      child.kill()
      self._say(f"killed {child.name} (SIGKILL at {kill.when}, as planned)")
      if kill.restart is not None:
        self._returns[child.name] = kill.restart
      elif self._cfg.restart == "always":
        self._return_after(child, self._cfg.first_pause_s, progress)

  def _reap(self, progress: Progress) -> None:
    for child in self.children.values():
      code = child.exit_code
      if code is None or self._reaped.get(child.name) == child.num_starts:
        continue
      self._reaped[child.name] = child.num_starts
      if child.was_killed:
        continue
      if code == 0:
        self._say(f"{child.name} ended")
        continue
      if self._is_stopping and code == -signal.SIGTERM:
        continue  # It was still starting, and had no state to save.
      if self._is_worth_another_life(child, code):
        pause_s = min(
          60.0,
          self._cfg.first_pause_s * 2 ** self._quick_failures[child.name],
        )
        self._say(
          f"{child.name} {describe_exit(code)}; starts again in {pause_s:g} s"
        )
        self._return_after(child, pause_s, progress)
      else:
        self._fail(child, code)

  def _is_worth_another_life(self, child: Child, code: int) -> bool:
    if self._cfg.restart == "never" or self._is_stopping:
      return False
    was_quick = time.monotonic() - child.started_s < 30.0
    count = self._quick_failures.get(child.name, -1) + 1 if was_quick else 0
    self._quick_failures[child.name] = count
    return code not in _FINAL_CODES and count < self._cfg.max_quick_failures

  def _fail(self, child: Child, code: int) -> None:
    failure = Failure(
      name=child.name,
      code=code,
      log=child.log,
      last_lines=child.last_lines(),
    )
    self.failures.append(failure)
    self._say(str(failure))

  def _return_after(
    self, child: Child, pause_s: float, progress: Progress
  ) -> None:
    self._returns[child.name] = Moment(progress.elapsed_s + pause_s, "s")

  def _return_due(self, progress: Progress) -> None:
    due = [n for n, when in self._returns.items() if when.is_past(progress)]
    for name in due:
      when = self._returns.pop(name)
      self.children[name].start(self.address)
      self._say(f"started {name} again (at {when})")

  def _end_what_is_left(self, progress: Progress) -> None:
    """Ends learners without a syncer, and a syncer without learners."""
    syncer_is_gone = not self._is_coming(self.syncer)
    learners_are_gone = not any(map(self._is_coming, self.learners))
    if syncer_is_gone:
      self._returns.clear()
    if not (syncer_is_gone or learners_are_gone):
      self._grace_ends = None
      return
    if self._grace_ends is None:
      grace_s = (
        self._cfg.finish_grace_s if syncer_is_gone else self._cfg.alone_grace_s
      )
      if syncer_is_gone and self.syncer.exit_code != 0:
        grace_s = 0.0  # It will not tell them anything any more.
      self._grace_ends = progress.elapsed_s + grace_s
    elif progress.elapsed_s >= self._grace_ends and not self._is_stopping:
      self._say(
        "the syncer is gone; stopping the learners"
        if syncer_is_gone
        else "no learner is left; stopping the syncer"
      )
      self.stop()

  def _is_coming(self, child: Child) -> bool:
    return child.is_running or child.name in self._returns

  def _kill_the_rest(self) -> None:
    for child in self.children.values():
      if child.is_running:
        self._say(f"{child.name} did not end on SIGTERM: SIGKILL")
        child.signal(signal.SIGKILL)
    for child in self.children.values():
      while child.is_running:
        time.sleep(0.01)
