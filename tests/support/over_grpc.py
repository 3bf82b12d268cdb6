"""Whole runs over real gRPC in one process: a served syncer, loops on threads."""

import contextlib
import hashlib
import json
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ddiloco_jax import config
from ddiloco_jax.launch import serving
from ddiloco_jax.learner import peer
from ddiloco_jax.learner.client import Client
from ddiloco_jax.learner.learner import Learner, LearnerConfig
from ddiloco_jax.learner.link import Link
from ddiloco_jax.learner.patience import LinkConfig
from ddiloco_jax.learner.recovery import Recovery, RecoveryConfig
from ddiloco_jax.protocol import events
from ddiloco_jax.wire.options import WireConfig
from tests.support.quadratic import Quadratic, constant_batches

THETA = {
  "a": np.zeros((3, 4), np.float32),
  "b": np.zeros((2, 5), np.float32),
  "c": np.zeros((), np.float32),
}
SHAPES = {path: array.shape for path, array in THETA.items()}


def settings(**sync: Any) -> config.Config:
  """Two fragments, a cycle of four steps, short waits, plain outer steps.

  Args:
    **sync: Settings of `sync`; a name with "__" is SECTION__NAME.
  """
  cfg = config.default()
  cfg.sync.num_fragments = 2
  cfg.sync.cycle_steps = 4
  cfg.sync.lease_s = 5.0
  cfg.sync.acknowledge_s = 10.0
  cfg.sync.flush_s = 5.0
  cfg.outer.learning_rate = 1.0
  cfg.outer.momentum = 0.0
  cfg.wire.up_format = "float32"
  for name, value in sync.items():
    section, _, key = name.rpartition("__")
    cfg[section or "sync"][key] = value
  return config.freeze(cfg)


class ServedRun:
  """A SyncerRun behind gRPC that serves until its run has ended.

  Attributes:
    run: The SyncerRun.
    address: HOST:PORT.
    directory: Of the run.
  """

  def __init__(self, served: serving.Served, directory: pathlib.Path):
    self.run, self.address = served
    self.directory = directory
    self._stop: str | None = None
    self._finished: events.Finished | None = None
    self._error: BaseException | None = None
    self._thread = threading.Thread(target=self._serve, daemon=True)
    self._thread.start()

  @property
  def syncer(self):
    return self.run.syncer

  def status(self):
    return self.syncer.status()

  def request_stop(self, reason: str = "the test is over") -> None:
    self._stop = reason

  def wait(self, timeout_s: float = 30.0) -> events.Finished:
    """The run's end.

    Raises:
      Exception: what ended the syncer.
    """
    self._thread.join(timeout_s)
    if self._error:
      raise self._error
    if self._finished is None:
      raise TimeoutError(f"not within {timeout_s} s: {self.status()}")
    return self._finished

  def _serve(self) -> None:
    try:
      self._finished = self.run.run(lambda: self._stop)
    except BaseException as error:
      self._error = error


@contextlib.contextmanager
def served_run(
  cfg: config.Config,
  run_dir: pathlib.Path,
  restore=False,
  theta=None,
  snapshot=None,
  files=None,
) -> Iterator[ServedRun]:
  theta = THETA if theta is None else theta
  start = serving.Start(cfg, run_dir, theta, snapshot, files)
  with serving.serving(start, "127.0.0.1:0", restore=restore) as served:
    run = ServedRun(served, run_dir)
    try:
      yield run
    finally:
      if run._finished is None and run._error is None:
        run.syncer.request_stop("the test is over")
        run._thread.join(20.0)


class _ToldLink(Link):
  """Tells what was adopted, once the loop says that it is in place."""

  def __init__(self, told: Callable, *args: Any):
    super().__init__(*args)
    self._told = told

  def adopted(self, publication, step, counts):
    self._told(publication.fragment, publication.version, step, counts)
    super().adopted(publication, step, counts)


class LoopLearner(threading.Thread):
  """The project's own loop and link over gRPC, with any trainer.

  Args:
    address: Of the syncer.
    name: Its id.
    trainer: See `learner.Trainer`.
    make_batches: Shard -> position -> batch.
    cfg: Of the loop.
    state_address: Where it serves its state; "" for a free port, "off".
    recover_s: See RecoveryConfig.
    save_cut, part: See Learner.
    wire: Of its client, and of its service for peers.
    **link: Settings of LinkConfig.

  Attributes:
    reason: Why it ended.
    error: What ended it, if not the run.
    steps: The boundaries that it has passed.
    adopted: [(fragment, version, step, counts, digest of the parameters)].
  """

  def __init__(
    self,
    address: str,
    name: str,
    trainer: Any,
    make_batches: Callable = constant_batches(100),  # noqa: B008
    cfg: LearnerConfig | None = None,
    wrap: Callable = lambda client: client,
    state_address: str = "off",
    recover_s: float = 30.0,
    save_cut: Callable | None = None,
    part: Any = None,
    wire: WireConfig | None = None,
    **link: Any,
  ):
    super().__init__(name=f"loop-{name}", daemon=True)
    self.client = Client(address, wire, learner=name)
    client = wrap(self.client)
    served = peer.serve_state(
      name, state_address, address, wire or WireConfig()
    )
    self.desk, self._server = served or (None, None)
    where = self._server.address if self._server else ""
    settings = {"connect_timeout_s": 10.0, "state_address": where, **link}
    self.recovery = Recovery(
      client.open_state,
      self.desk,
      RecoveryConfig(patience_s=recover_s),
    )
    self._stopping = threading.Event()
    self.link = _ToldLink(
      self._adopted,
      client,
      name,
      LinkConfig(**settings),
      self._stopping.is_set,
    )
    self.trainer = trainer
    self.adopted: list[tuple] = []
    self.reason: str | None = None
    self.error: BaseException | None = None
    self.steps: list[int] = []
    self._make_batches = make_batches
    self._save_cut, self._part = save_cut, part
    self._cfg = cfg or LearnerConfig()

  def _adopted(self, p, version, step, counts) -> None:
    paths = [leaf.path for leaf in self.link.run.layout.fragment(p)]
    digest = digest_of(self.trainer.take(paths))
    self.adopted.append((p, version, step, counts, digest))

  def kill(self) -> None:
    """Vanishes, as by SIGKILL: nothing more is heard of it."""
    self.client.close()
    self._close_server()
    self.stop()

  def stop(self) -> None:
    """As a preemption notice does."""
    self._stopping.set()

  def run(self) -> None:
    try:
      loop = Learner(
        self.link,
        self.trainer,
        self._make_batches,
        self._cfg,
        lambda step, metrics, progress: self.steps.append(step),
        self.recovery,
        save_cut=self._save_cut,
        part=self._part,
      )
      self.reason = loop.train(self._stopping.is_set)
    except BaseException as error:
      self.error = error
      self.link.leave("failed")
    finally:
      self.client.close()
      self._close_server()

  def _close_server(self) -> None:
    if self._server:
      self._server.close()

  def end(self, timeout_s: float = 30.0) -> str:
    """Why it ended, once it has.

    Raises:
      Exception: what ended it, if not the run.
    """
    self.join(timeout_s)
    if self.error:
      raise self.error
    if self.reason is None:
      raise TimeoutError(f"{self.name} runs after {timeout_s} s")
    return self.reason


class Held:
  """A client whose pushes wait while the gate is shut."""

  def __init__(self, client: Any, gate: threading.Event):
    self._client = client
    self._gate = gate

  def __getattr__(self, name: str):
    return getattr(self._client, name)

  def push(self, header: Any, chunks: Any):
    self._gate.wait(60.0)
    return self._client.push(header, chunks)


@contextlib.contextmanager
def learners(*all_of_them: LoopLearner) -> Iterator[tuple[LoopLearner, ...]]:
  """Starts them, and ends those that still run."""
  for learner in all_of_them:
    learner.start()
  try:
    yield all_of_them
  finally:
    for learner in all_of_them:
      learner.stop()
    for learner in all_of_them:
      learner.join(15.0)


def paced(
  step_s: float, target: float = 1.0, lr: float = 0.05, shapes=None
) -> Quadratic:
  """A quadratic whose step takes so long."""
  wait = threading.Event().wait
  return Quadratic(shapes or SHAPES, target, lr, lambda: wait(step_s))


def digest_of(arrays: Any) -> str:
  """Of the float32 bytes, path by path."""
  found = hashlib.sha256()
  for path in sorted(arrays):
    found.update(path.encode() + b"\0")
    found.update(np.ascontiguousarray(arrays[path], np.float32).tobytes())
  return found.hexdigest()


def strict_lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """The lines of a file as JSON that knows no NaN.

  Raises:
    ValueError: a line is no such JSON.
  """

  def refuse(word: str):
    raise ValueError(f"{path} has {word}, which JSON has no word for")

  lines = path.read_text("utf-8").splitlines()
  return [json.loads(line, parse_constant=refuse) for line in lines]
