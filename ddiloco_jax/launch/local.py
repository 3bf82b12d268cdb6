"""A whole run on this machine: syncer and learners, watched until the end."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live

from ddiloco_jax.launch import calling, exits, failures, view
from ddiloco_jax.launch.plan import SYNCER, learner_name
from ddiloco_jax.launch.run import Run
from ddiloco_jax.learner.client import Client
from ddiloco_jax.wire.options import WireConfig
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError
from ddiloco_jax.wire.tokens import ONLOOKER

_TURN_S = 0.1  # A planned kill and a dead process are seen within this.
_STATUS_S = 1.0
_LINE_S = 5.0  # Where there is no terminal, a line is printed this often.


class StopRequests:
  """Counts SIGINT and SIGTERM: the first asks nicely, the second does not."""

  def __init__(self):
    self.count = 0
    self._raises = False

  def catch(self) -> None:
    """Installs the handlers; call it on the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, self._add)

  def end_at_once(self, text: str) -> None:
    """From now on a request ends this process, with these last words."""

    def end(number: int, frame: object) -> None:
      print(text, flush=True)
      os._exit(exits.FAILED)

    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, end)

  def _add(self, number: int, frame: object) -> None:
    self.count += 1


class Screen:
  """Shows a run: a live table on a terminal, else a line now and then."""

  def __init__(self, console: Console):
    self._console = console
    self._live: Live | None = None
    self._printed_at = 0.0

  @contextlib.contextmanager
  def open(self) -> Iterator[None]:
    """On a terminal, the table stays below whatever is said meanwhile."""
    if not self._console.is_terminal:
      yield
      return
    with Live(console=self._console, refresh_per_second=4) as self._live:
      yield

  def say(self, text: str) -> None:
    self._console.print(text, markup=False, highlight=False)

  def show(self, status: pb.Status | None, processes: dict[str, str]) -> None:
    if self._live is not None:
      self._live.update(view.render(status, processes))
    elif time.monotonic() - self._printed_at >= _LINE_S:
      self._printed_at = time.monotonic()
      self.say(view.one_line(status))


class Watch:
  """The newest status of a syncer; one that cannot be reached keeps the old."""

  def __init__(self, address: str, cfg: WireConfig):
    self.status: pb.Status | None = None
    self._client = Client(address, cfg, learner=ONLOOKER)
    self._asked_at = 0.0

  def refresh(self) -> None:
    """Asks, if the last answer is a second old."""
    if time.monotonic() - self._asked_at < _STATUS_S:
      return
    with contextlib.suppress(ServiceError):
      self.status = self._client.status()
    self._asked_at = time.monotonic()

  def close(self) -> None:
    self._client.close()


def drive(
  run: Run,
  kills: tuple[failures.Kill, ...],
  requests: StopRequests,
  screen: Screen,
) -> int:
  """Runs a run of processes from its start to its end.

  Returns:
    The exit code: that of the first process that failed, the syncer's first.
  """
  try:
    with screen.open():
      screen.show(None, learner_states(run))
      if run.start_syncer(lambda: requests.count > 0):
        run.start_learners()
        _watch(run, kills, requests, screen)
      return run.exit_code()
  finally:
    # Whatever happens here, no process of the run is left behind.
    run.stop(lambda: requests.count > 1)


def _watch(
  run: Run,
  kills: tuple[failures.Kill, ...],
  requests: StopRequests,
  screen: Screen,
) -> None:
  with exits.edge():
    wire = calling.recorded(run.address_path.parent, timeout_s=2.0)
    watch = Watch(run.address, wire)
  start = time.monotonic()
  try:
    while not requests.count:
      watch.refresh()
      progress = failures.Progress(time.monotonic() - start)
      if watch.status is not None:
        of = watch.status.num_syncer_steps
        with exits.edge():
          failures.check_ends(kills, of)
        progress = progress._replace(t=watch.status.t, num_syncer_steps=of)
        for learner in watch.status.learners:
          child = run.children.get(learner_name(learner.learner_id))
          if child and learner.training:
            child.give_way()
      if run.advance(progress):
        return
      if run.syncer.is_running:  # Else the last status would grow old.
        screen.show(watch.status, learner_states(run))
      time.sleep(_TURN_S)
    screen.say("stopping; once more ends everything at once")
    run.stop(lambda: requests.count > 1)
  finally:
    watch.close()


def learner_states(run: Run) -> dict[str, str]:
  """Learner id -> what its process does."""
  prefix = learner_name("")
  return {
    name.removeprefix(prefix): state
    for name, state in run.states().items()
    if name != SYNCER
  }


def conclude(
  run_dir: pathlib.Path, requests: StopRequests, screen: Screen
) -> int:
  """Evaluates, writes report.html and summary.json, and prints the summary.

  A request to stop leaves out the evaluation, another one all the rest.

  Returns:
    An exit code: whether there is a summary.
  """
  if not (run_dir / "tape.jsonl").exists():
    screen.say(f"nothing was recorded in {run_dir}")
    return exits.FAILED
  try:
    losses = {} if requests.count > 1 else evaluate(run_dir, requests, screen)
    requests.end_at_once(f"stopped before {run_dir} had its summary")
    _sum_up(run_dir, losses, screen)
  except ValueError as error:
    screen.say(f"there is no summary of {run_dir}: {error}")
    return exits.FAILED
  return exits.OK


def evaluate(
  run_dir: pathlib.Path,
  requests: StopRequests,
  screen: Screen,
  theta: pathlib.Path | None = None,
) -> dict[str, float | None]:
  """The held-out losses; none, if that is stopped.

  In a process of its own, which can be ended whatever it does.

  Args:
    theta: Theta 0 of a run of numpy learners.

  Raises:
    ValueError: it failed.
  """
  screen.say("evaluating on held-out text; Ctrl-C leaves that out")
  count = requests.count
  child = subprocess.Popen(
    [
      *(sys.executable, "-m", "ddiloco_jax.launch.held_out", run_dir),
      *([theta] if theta else []),
    ],
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,  # A Ctrl-C reaches the launcher only.
  )
  while requests.count == count:
    with contextlib.suppress(subprocess.TimeoutExpired):
      out, err = child.communicate(timeout=_TURN_S)
      if child.returncode:
        raise ValueError(f"the evaluation failed:\n{err[-2000:]}")
      return json.loads(out.splitlines()[-1])
  child.kill()
  child.communicate()
  screen.say(
    "the evaluation was stopped: loss_start, loss_end and bigram_entropy are"
    " missing; once more, and there is no summary"
  )
  return {}


def _sum_up(
  run_dir: pathlib.Path, losses: dict[str, float | None], screen: Screen
) -> None:
  from ddiloco_jax.report import report, summary

  figures = report.write_report(run_dir, losses)
  screen.say("summary")
  screen.say(summary.to_text(figures))
  screen.say(f"  run directory  {run_dir}")
  screen.say(f"  report         {run_dir / 'report.html'}")
  sys.stdout.flush()
  print(run_dir / "summary.json", flush=True)


def default_run_dir(config: str) -> pathlib.Path:
  """runs/NAME-DATE-TIME, a directory of its own for every run."""
  stamp = time.strftime("%Y%m%d-%H%M%S")
  return pathlib.Path("runs") / f"{pathlib.Path(config).stem}-{stamp}"
