"""A syncer's run behind its gRPC server."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ddiloco_jax import config
from ddiloco_jax.launch import exits
from ddiloco_jax.launch.syncing import Post, SyncerRun
from ddiloco_jax.syncer import server
from ddiloco_jax.syncer.errors import Superseded
from ddiloco_jax.syncer.files import Files

_STOP_GRACE_S = 2.0  # For the last words of open calls.
_OTHER_CALLS = 8  # Those who watch a run hold one each.


class Served(NamedTuple):
  """A syncer that learners can reach."""

  run: SyncerRun
  address: str


class Start(NamedTuple):
  """What a syncer is started with.

  Attributes:
    cfg: Settings.
    run_dir: The run's directory.
    theta: See SyncerRun.
    snapshot: Likewise.
    files: Likewise.
    on_lost: Likewise; the server is shut by then.
  """

  cfg: config.Config
  run_dir: pathlib.Path
  theta: Mapping[str, np.ndarray] | None = None
  snapshot: pathlib.Path | None = None
  files: Files | None = None
  on_lost: Callable[[Superseded], None] = lambda error: None


@contextlib.contextmanager
def listening(
  cfg: config.Config, address: str, waits_for: Callable[[], str]
) -> Iterator[server.Server]:
  """A server that refuses calls until it serves a run.

  Args:
    waits_for: See Server.

  Raises:
    InUse: the address is taken.
    BadUsage: an address or settings that cannot be.
  """
  with exits.edge():
    _check_calls(cfg)
    made = server.Server(address, cfg.wire, waits_for)
  try:
    yield made
  finally:
    made.stop(0.0)


@contextlib.contextmanager
def serving(
  start: Start, address: str, *, restore: bool = False
) -> Iterator[Served]:
  """A syncer behind its gRPC server; RUN_DIR/address tells where.

  Raises:
    InUse: the address or the directory is taken.
    BadUsage: an address, a directory or settings that cannot be; a run that
      has ended.
  """
  what = "restores" if restore else "begins"
  said = f"this syncer {what} the run in {start.run_dir}"
  # First the address: one that cannot be leaves no trace.
  with (
    listening(start.cfg, address, lambda: said) as at,
    serving_at(at, start, restore=restore) as served,
  ):
    yield served


@contextlib.contextmanager
def serving_at(
  at: server.Server, start: Start, *, restore: bool, takes_over: int = 0
) -> Iterator[Served]:
  """The same behind a server that listens.

  Args:
    takes_over: See Post.

  Raises:
    TooLate: another syncer has taken over first.
  """

  def step_down(error: Superseded) -> None:
    at.shut(0.0)  # At once: learners look for another syncer.
    start.on_lost(error)

  post = Post(at.address, takes_over, step_down)
  with contextlib.ExitStack() as stack:
    run = SyncerRun(
      start.cfg,
      str(start.run_dir),
      restore=restore,
      theta=start.theta,
      files=start.files,
      snapshot=start.snapshot,
      post=post,
    )
    stack.callback(run.close)
    at.serve(run.syncer)
    stack.callback(at.stop, _STOP_GRACE_S)  # Before the run closes.
    with exits.writing_to(start.run_dir):
      (start.run_dir / "address").write_text(at.address)
    yield Served(run, at.address)


def _check_calls(cfg: config.Config) -> None:
  """Refuses a server that its learners alone would fill.

  No relation of the config: a learner's own `wire.max_calls` serves nobody.
  """
  needed = 2 * cfg.sync.max_learners + _OTHER_CALLS
  if cfg.wire.max_calls < needed:
    raise ValueError(
      f"wire.max_calls is {cfg.wire.max_calls}: with sync.max_learners="
      f"{cfg.sync.max_learners} it must be at least {needed}, a stream and a"
      f" transfer for each learner and {_OTHER_CALLS} more. Raise it, or lower"
      " sync.max_learners."
    )
