"""What every process of a run does at its edges: flags, logs, exit codes.

An error that a person can act on is one line on stderr, any other keeps its
traceback.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import app, flags

from ddiloco_jax import config
from ddiloco_jax.launch import logs
from ddiloco_jax.launch.exits import (
  BAD_USAGE,
  FAILED,
  FENCED,
  IN_USE,
  NO_SYNCER,
  OK,
  QUORUM_TIMEOUT,
  SUPERSEDED,
  WRITE_FAILED,
  BadUsage,
  WriteFailed,
)
from ddiloco_jax.learner import peer
from ddiloco_jax.learner.client import Client
from ddiloco_jax.learner.link import Link
from ddiloco_jax.learner.patience import LinkConfig, Stopped, SyncerLost
from ddiloco_jax.learner.recovery import Recovery, RecoveryConfig
from ddiloco_jax.protocol import ending
from ddiloco_jax.syncer.errors import InUse, Superseded
from ddiloco_jax.wire.status import ServiceError

assert ending.EXIT_QUORUM_TIMEOUT == QUORUM_TIMEOUT


def refuse_owned(names: Sequence[str]) -> None:
  """Refuses a learner's overrides of what the syncer owns."""
  if names:
    raise ValueError(
      f"--config.{names[0]} was given to a learner: the syncer owns it, so"
      " that all learners agree. Give it to ddiloco_jax.cli.syncer (or"
      " cli.local) instead."
    )


def end_soon(error: Superseded, grace_s: float) -> None:
  """Ends this process even where a disk that hangs keeps it from doing so."""

  def end() -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(SUPERSEDED)

  timer = threading.Timer(grace_s, end)
  timer.daemon = True
  timer.start()


class Joint(NamedTuple):
  """What ties one learner process to its syncer and to its peers.

  Attributes:
    is_too_late: Whether it was refused because the run has come to its end.
  """

  link: Link
  recovery: Recovery
  is_too_late: Callable[[ServiceError], bool]
  close: Callable[[], None]


def join(
  cfg: config.Config,
  syncer: str,
  learner: str,
  takeover: bool,
  should_stop: Callable[[], bool] = lambda: False,
) -> Joint:
  """The link of one learner process over gRPC, and its service for peers.

  Raises:
    OSError, ValueError: it cannot serve where it is told to.
  """
  addresses = syncer.split(",")
  client = Client(addresses, cfg.wire, learner=learner)
  served = peer.serve_state(
    learner, cfg.run.state_address, addresses[0], cfg.wire
  )
  desk, server = served or (None, None)
  link = Link(
    client,
    learner,
    LinkConfig(
      takeover=takeover,
      connect_timeout_s=cfg.run.connect_timeout_s,
      max_solo_s=cfg.run.max_solo_s,
      reconnect_max_s=cfg.wire.reconnect_max_s,
      state_address=server.address if server else "",
    ),
    should_stop,
  )
  recovery = Recovery(
    client.open_state, desk, RecoveryConfig(patience_s=cfg.run.recover_s)
  )

  def is_too_late(error: ServiceError) -> bool:
    if error.code != "FAILED_PRECONDITION":
      return False
    with contextlib.suppress(ServiceError):
      return client.status().phase in ("flushing", "finished")
    return False

  close = server.close if server else lambda: None
  return Joint(link, recovery, is_too_late, close)


def run(main: Callable[[], int], usage: str | None) -> None:
  """Runs a command: flags, logs, errors as exit codes."""

  def call(argv: Sequence[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(
        f"{argv[1]!r} is no flag; flags are --name=value (underscores).",
        exitcode=BAD_USAGE,
      )
    logs.begin()
    sys.exit(_code(main))

  sys.modules["__main__"].__doc__ = usage
  app.run(call, flags_parser=_parse)


def _parse(argv: Sequence[str]) -> list[str]:
  """Flags, with this project's exit codes; absl's own are 1, for --help too."""
  if config.FLAG in flags.FLAGS:  # Defined elsewhere, but of every command.
    flags.FLAGS.register_key_flag_for_module(argv[0], flags.FLAGS[config.FLAG])
  if "--help" in argv[1:]:
    app.usage(shorthelp=True, writeto_stdout=True)
    sys.exit(OK)
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    message = str(error).rstrip(".")
    print(f"error: {message}. See --help.", file=sys.stderr, flush=True)
    sys.exit(BAD_USAGE)


def _code(main: Callable[[], int]) -> int:
  try:
    return main()
  except BadUsage as error:
    code, message = BAD_USAGE, str(error)
  except InUse as error:
    code, message = IN_USE, str(error)
  except WriteFailed as error:
    code, message = WRITE_FAILED, str(error)
  except Superseded as error:
    code, message = SUPERSEDED, str(error)
  except Stopped as stopped:
    print(stopped, flush=True)
    return OK
  except SyncerLost as error:
    code, message = NO_SYNCER, str(error)
  except ServiceError as error:
    code = FENCED if error.code == "ABORTED" else FAILED
    message = str(error)
  print(f"error: {message}", file=sys.stderr, flush=True)
  return code
