"""A storm: a run of processes, a plan of faults done to it, and its pair.

The pair is a run of the same seed without faults that merges as many tokens; it
tells what the faults cost in held-out loss.
"""

import contextlib
import dataclasses
import json
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco_jax.chaos import plan as chaos
from ddiloco_jax.launch import calling, exits, failures, inject, local, plan
from ddiloco_jax.launch.relay import Relay
from ddiloco_jax.launch.run import LaunchConfig, Run
from ddiloco_jax.learner.client import Client
from ddiloco_jax.report import ordeal, report, verdict
from ddiloco_jax.wire.options import WireConfig
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError
from ddiloco_jax.wire.tokens import ONLOOKER

_TURN_S = 0.05
_FIRST_STEPS_S = 600.0  # Everybody has taken a step by then, or it is over.
_BACK_S = 90.0  # After a storm, for all to come back.
_POLICY = LaunchConfig(restart="always", max_quick_failures=1000)


class Failed(Exception):
  """A storm that could not be had: its run ended, or never began."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StormConfig:
  """A storm and its fault-free pair.

  Attributes:
    run: The run; the directory is that of the storm itself.
    chaos: What the faults are drawn from.
    pair_dir: Of the fault-free run; None for no pair.
  """

  run: plan.RunPlan
  chaos: chaos.ChaosConfig
  pair_dir: pathlib.Path | None


def weather(
  cfg: StormConfig, requests: local.StopRequests, screen: local.Screen
) -> dict[str, Any]:
  """Has a storm, then its pair.

  Returns:
    The figures, as `verdict.measure` names them.

  Raises:
    Failed: there is no verdict; says why.
    BadUsage, WriteFailed: a directory that cannot be written to.
    ValueError: records that cannot be read.
  """
  lay_out(cfg)
  run_dir = cfg.run.run_dir
  _have(cfg.run, cfg.chaos, requests, screen)
  facts = ordeal.read_ordeal(run_dir)
  figures = verdict.measure(facts, cfg.run.num_learners)
  if cfg.pair_dir is None or requests.count:
    report.write_report(run_dir, {})
    return figures
  merged = report.merged_tokens(run_dir)
  screen.say(f"the same without faults, to {merged:,.0f} merged tokens")
  calm = dataclasses.replace(
    cfg.run,
    run_dir=cfg.pair_dir,
    overrides=(*cfg.run.overrides, f"--config.sync.num_tokens={merged:.0f}"),
  )
  _have(calm, None, requests, screen)
  theta = cfg.run.numpy.theta if cfg.run.numpy else None
  losses = [
    _loss(path, theta, requests, screen) for path in (run_dir, cfg.pair_dir)
  ]
  stormy, fault_free = losses
  ratio = stormy / fault_free if stormy and fault_free else None
  return {
    **figures,
    "tokens_merged": merged,
    "tokens_merged_fault_free": report.merged_tokens(cfg.pair_dir),
    "loss": stormy,
    "loss_fault_free": fault_free,
    "loss_ratio_to_fault_free": ratio,
  }


def lay_out(cfg: StormConfig) -> None:
  """Writes down what NumPy learners begin with, for the storm and its pair.

  Raises:
    BadUsage, WriteFailed: it cannot be written.
  """
  if cfg.run.numpy is None:
    return
  # Imported here: they load JAX.
  from ddiloco_jax.launch import arrays, numpy_model

  theta = cfg.run.numpy.theta
  with exits.writing_to(theta.parent):
    arrays.save_arrays(theta, [numpy_model.init_params(cfg.chaos.seed)])


def _loss(
  run_dir: pathlib.Path,
  theta: pathlib.Path | None,
  requests: local.StopRequests,
  screen: local.Screen,
) -> float | None:
  losses = local.evaluate(run_dir, requests, screen, theta)
  report.write_report(run_dir, losses)
  return losses.get("loss_end")


def _have(
  run_plan: plan.RunPlan,
  cfg: chaos.ChaosConfig | None,
  requests: local.StopRequests,
  screen: local.Screen,
) -> None:
  """Runs one run: through a storm if there is a plan, else until it ends."""
  faults = chaos.plan_faults(cfg) if cfg else ()
  jumps = run_plan.run_dir.absolute() / "jumps"
  with contextlib.ExitStack() as stack:
    relays = [Relay() for _ in range(run_plan.num_learners if cfg else 0)]
    for relay in relays:
      stack.callback(relay.close)
    processes = _on_one_thread(plan.plan_run(run_plan))
    if cfg:
      processes = _behind_relays(processes, relays, jumps)
    policy = _POLICY if cfg else LaunchConfig()
    run = Run(
      processes, run_plan.run_dir, policy, inject.kills_of(faults), screen.say
    )
    stack.callback(run.stop, lambda: requests.count > 1)
    if not run.start_syncer(lambda: requests.count > 0):
      raise Failed("the syncer did not start")
    for relay in relays:
      relay.redirect(run.address)
    run.start_learners()
    with exits.edge():
      wire = calling.recorded(run_plan.run_dir, timeout_s=2.0)
      watcher = _Watcher(run.address, wire)
    stack.callback(watcher.close)
    storm = _Storm(run, watcher, requests, screen)
    if cfg is None:
      storm.until_the_end()
    else:
      record = inject.Record(run_plan.run_dir)
      stack.callback(record.close)
      injector = inject.Injector(
        faults, run.children, relays, jumps, record, screen.say
      )
      stack.callback(lambda: injector.heal(time.monotonic() - storm.began_at))
      storm.through(injector, record, cfg.duration_s)


def _on_one_thread(
  processes: Sequence[plan.Process],
) -> tuple[plan.Process, ...]:
  """Many learners share few cores: XLA takes one thread for each of them."""
  flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
  return tuple(
    p
    if p.name == plan.SYNCER
    else dataclasses.replace(p, env={**p.env, "XLA_FLAGS": flags})
    for p in processes
  )


def _behind_relays(
  processes: Sequence[plan.Process],
  relays: Sequence[Relay],
  jumps: pathlib.Path,
) -> tuple[plan.Process, ...]:
  """Learners reach the syncer through a relay, and their clocks can jump."""

  def change(argv: tuple[str, ...], relay: Relay) -> tuple[str, ...]:
    argv = tuple(word.replace(plan.ADDRESS, relay.address) for word in argv)
    python, _, module, *rest = argv
    wrapper = "ddiloco_jax.launch.jumping"
    return (python, "-m", wrapper, str(jumps), module, *rest)

  syncer, *learners = processes
  return (
    syncer,
    *(
      dataclasses.replace(
        learner,
        argv=change(learner.argv, relay),
        again=change(learner.again, relay),
      )
      for learner, relay in zip(learners, relays, strict=True)
    ),
  )


class _Watcher:
  """Asks the syncer for its status on a thread, so that nothing waits for it.

  Attributes:
    status: The newest.
    offsets: Epoch -> how far the machine's clock is ahead of the run's; the
      least seen, which is the truest.
  """

  def __init__(self, address: str, cfg: WireConfig):
    self.status: pb.Status | None = None
    self.offsets: dict[int, float] = {}
    self._client = Client(address, cfg, learner=ONLOOKER)
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._ask, daemon=True)
    self._thread.start()

  def _ask(self) -> None:
    while not self._over.wait(0.3):
      with contextlib.suppress(ServiceError):
        status = self._client.status()
        ahead_s = time.monotonic() - status.time_s
        known = self.offsets.get(status.epoch, ahead_s)
        self.offsets[status.epoch] = min(ahead_s, known)
        self.status = status

  def close(self) -> None:
    self._over.set()
    self._thread.join()
    self._client.close()


class _Storm:
  """The loop of the launcher, before, in and after the storm."""

  def __init__(
    self,
    run: Run,
    watcher: _Watcher,
    requests: local.StopRequests,
    screen: local.Screen,
  ):
    self.began_at = time.monotonic()
    self._run = run
    self._watcher = watcher
    self._requests = requests
    self._screen = screen

  def until_the_end(self) -> None:
    """The run ends by itself."""
    while not self._turn(time.monotonic() - self.began_at):
      pass

  def through(
    self, injector: inject.Injector, record: inject.Record, duration_s: float
  ) -> None:
    """Waits for everybody's first step, storms, heals, and ends the run."""
    start = time.monotonic()
    while not self._all_have_stepped():
      if time.monotonic() - start > _FIRST_STEPS_S:
        raise Failed(f"no first step of all within {_FIRST_STEPS_S:g} s")
      self._turn(-1.0)  # No kill is due.
    self.began_at = time.monotonic()
    self._screen.say("everybody has taken a step: the storm begins")
    record.write("begin", 0.0)
    notes = _Notes(self._run, self._watcher, record, self.began_at)
    while (now_s := time.monotonic() - self.began_at) < duration_s:
      injector.advance(now_s)
      notes.advance(now_s)
      if self._turn(now_s):
        raise Failed("the run ended in the storm")
    injector.heal(now_s)
    record.write("over", now_s)
    self._screen.say("the storm is over; who is away comes back")
    while not self._all_are_back() and now_s < duration_s + _BACK_S:
      now_s = time.monotonic() - self.began_at
      injector.advance(now_s)
      notes.advance(now_s)
      if self._turn(now_s):
        raise Failed("the run ended after the storm")
    notes.write_clocks(now_s)

  def _all_are_back(self) -> bool:
    """The syncer serves, and everybody trains under it."""
    status = self._watcher.status
    return (
      self._run.syncer.is_running
      and status is not None
      and len(self._watcher.offsets) == self._run.syncer.num_starts
      and status.num_training == len(self._run.learners)
    )

  def _all_have_stepped(self) -> bool:
    status = self._watcher.status
    if status is None:
      return False
    ready = sum(each.step >= 1 for each in status.learners)
    return ready == len(self._run.learners)

  def _turn(self, elapsed_s: float) -> bool:
    """One look at the processes; True once all have ended."""
    if self._requests.count:
      raise Failed("it was stopped")
    status = self._watcher.status
    for learner in status.learners if status else ():
      child = self._run.children.get(plan.learner_name(learner.learner_id))
      if child and learner.training:
        child.give_way()
    if self._run.advance(failures.Progress(elapsed_s)):
      return True
    self._screen.show(status, local.learner_states(self._run))
    time.sleep(_TURN_S)
    return False


class _Notes:
  """Writes down when a syncer listens and falls silent, and the clocks."""

  def __init__(
    self,
    run: Run,
    watcher: _Watcher,
    record: inject.Record,
    began_at: float,
  ):
    self._run = run
    self._watcher = watcher
    self._record = record
    self._began_at = began_at
    self._path = run.address_path
    self._epoch = watcher.status.epoch if watcher.status else 1
    self._mtime = self._path.stat().st_mtime_ns
    self._is_silent = False
    record.write("listening", 0.0, epoch=self._epoch)

  def advance(self, now_s: float) -> None:
    if not self._run.syncer.is_running and not self._is_silent:
      self._is_silent = True
      self._record.write("silent", now_s, epoch=self._epoch)
    if (mtime := self._path.stat().st_mtime_ns) != self._mtime:
      # Written as soon as it serves; every start is an epoch.
      self._mtime, self._is_silent = mtime, False
      self._epoch += 1
      self._record.write("listening", now_s, epoch=self._epoch)

  def write_clocks(self, now_s: float) -> None:
    for epoch, ahead_s in sorted(self._watcher.offsets.items()):
      offset_s = ahead_s - self._began_at
      self._record.write("clock", now_s, epoch=epoch, offset_s=offset_s)


def conclude(
  seeds: Sequence[dict[str, Any]], say: Callable[[str], None], *, as_json: bool
) -> bool:
  """Prints the verdict; True if it holds.

  Args:
    seeds: The figures of each storm.
    say: Takes lines for people.
    as_json: A line of JSON on stdout, too.
  """
  told = [verdict.judge(figures) for figures in seeds]
  for n, bars in enumerate(told):
    say(f"verdict, storm {n + 1} of {len(told)}")
    say(verdict.to_text(bars))
  mean = verdict.mean_loss_ratio(seeds)
  holds = verdict.holds(told, mean)
  if len(seeds) > 1 and mean is not None:
    say(f"mean loss_ratio_to_fault_free of {len(seeds)}: {mean:.4f}")
  say("the verdict holds" if holds else "the verdict does not hold")
  if as_json:
    values = {
      "holds": holds,
      "loss_ratio_to_fault_free": mean,
      "storms": list(seeds),
    }
    print(json.dumps(values, allow_nan=False), flush=True)
  return holds
