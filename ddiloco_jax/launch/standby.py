"""A syncer that stands by for another one, and takes over when that is gone.

It changes nothing in the run's directory before its turn; then it starts as
after `--restore`, in an epoch of its own, on its own address.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator

from ddiloco_jax import config
from ddiloco_jax.launch import exits, serving, starting, syncing
from ddiloco_jax.syncer.errors import TooLate
from ddiloco_jax.syncer.files import OsFiles
from ddiloco_jax.syncer.journal import Journal
from ddiloco_jax.syncer.watch import Watch

_log = logging.getLogger(__name__)
_LOOK_S = 0.5  # How often it looks, at least, whether it is to stop.
ShouldStop = Callable[[], str | None]


class StoodDown(Exception):
  """A standby that is not needed any more.

  Attributes:
    exit_code: Of its process.
  """

  def __init__(self, reason: str, exit_code: int):
    super().__init__(reason)
    self.exit_code = exit_code


@contextlib.contextmanager
def standing_by(
  start: serving.Start,
  address: str,
  should_stop: ShouldStop,
  ready: Callable[[str], object] = lambda address: None,
) -> Iterator[serving.Served]:
  """A syncer that serves the run in a directory, once it is its turn.

  Args:
    address: HOST:PORT to listen on from now on.
    should_stop: Asked while it stands by.
    ready: Called with its address when it stands by.

  Raises:
    StoodDown: the run has ended, or it was told to stop.
    Others: as `serving`.
  """
  with exits.edge():
    _check(start.cfg)
  if start.theta is None:  # Now, and not when every second counts.
    start = start._replace(theta=syncing.init_params(start.cfg))
  watch = Watch(
    start.run_dir,
    Journal(start.run_dir / "journal", OsFiles()),
    start.cfg.run.standby_lease_s,
  )
  with (
    serving.listening(start.cfg, address, watch.sentence) as at,
    contextlib.ExitStack() as stack,
  ):
    ready(at.address)
    served = None
    while served is None:
      _wait(start, watch, should_stop)
      _log.warning("takes over: %s", watch.sentence())
      turn = serving.serving_at(
        at, start, restore=True, takes_over=watch.epoch + 1
      )
      try:
        served = stack.enter_context(turn)
      except TooLate as error:
        _log.warning("%s: stands by for that one", error)
    yield served


def _check(cfg: config.Config) -> None:
  if not cfg.run.standby_lease_s:
    raise ValueError(
      "--standby with run.standby_lease_s=0: without a lease nobody knows when"
      " the other syncer has stepped down. Set it above 0, to the same at both."
    )
  if cfg.run.accept_loss:
    raise ValueError(
      "--standby with run.accept_loss=True: what is lost is for a person to"
      " accept, who starts a syncer with --restore; a standby takes over"
      " unseen. Leave one of them out."
    )


def _wait(start: serving.Start, watch: Watch, should_stop: ShouldStop) -> None:
  """Returns when it is this standby's turn.

  Raises:
    StoodDown: see `standing_by`.
    BadUsage: settings with which it could never take over.
  """
  seen, is_checked = None, False
  while True:
    watch.look()
    if (now := (watch.epoch, watch.beat is None)) != seen:
      _log.info("%s", watch.sentence())
      seen, is_checked = now, False
    is_checked = is_checked or _fits(start)
    if watch.ended:
      reason = f"the run has ended: {watch.ended.ended}"
      raise StoodDown(reason, watch.ended.exit_code)
    if reason := should_stop():
      raise StoodDown(reason, exits.OK)
    if watch.is_due():
      return
    time.sleep(min(watch.pause_s, _LOOK_S))


def _fits(start: serving.Start) -> bool:
  """Whether these settings fit those of the run; False if it has none yet.

  Raises:
    BadUsage: they do not fit.
  """
  try:
    text = (start.run_dir / "config.json").read_text("utf-8")
    saved = json.loads(text)
  except (OSError, ValueError):
    return False
  with exits.edge():
    starting.check_fixed(start.cfg, saved)
  return True
