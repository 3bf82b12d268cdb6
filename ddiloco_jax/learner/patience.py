"""How long a learner calls a syncer that does not answer."""

import dataclasses
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from ddiloco_jax.wire.status import ServiceError

T = TypeVar("T")
_log = logging.getLogger(__name__)
_SAY_S = 5.0  # A wait is logged as often.


class SyncerLost(Exception):
  """No syncer was reachable for longer than the learner may go on alone."""


class Stopped(Exception):
  """This process, or the run, had to stop before it had every fragment."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
  """How a link behaves towards its syncer.

  Attributes:
    takeover: Fence a live process of the same id.
    connect_timeout_s: How long the first join may take.
    max_solo_s: How long a joined learner goes on without a syncer.
    reconnect_max_s: Longest pause between two attempts.
    state_address: Where this learner serves its state to peers, HOST:PORT.
  """

  takeover: bool = False
  connect_timeout_s: float = 120.0
  max_solo_s: float = 3600.0
  reconnect_max_s: float = 1.0
  state_address: str = ""


class Patience:
  """Calls again until there is an answer, no hope, or no wish for one.

  Args:
    learner: Whose, for the log.
    pause_max_s: Longest pause between two attempts.
    is_over: Whether nobody wants the answer any more; it may raise instead.
  """

  def __init__(
    self, learner: str, pause_max_s: float, is_over: Callable[[], bool]
  ):
    self._learner = learner
    self._pause_max_s = pause_max_s
    self._is_over = is_over

  def pause(self) -> None:
    """Sleeps before another attempt; no two learners do for equally long."""
    time.sleep(random.uniform(0.1, self._pause_max_s))

  def call(
    self, call: Callable[[], T], timeout_s: float, what: str
  ) -> T | None:
    """The answer; None once it is over.

    Args:
      call: Raises a ServiceError that is worth retrying while nobody answers.
      timeout_s: How long nobody may answer.
      what: The call's name.

    Raises:
      SyncerLost: nobody answered for too long.
      ServiceError: what no other attempt would change.
    """
    start, said = time.monotonic(), -_SAY_S
    while True:
      try:
        return call()
      except ServiceError as error:
        waited_s = time.monotonic() - start
        if not error.is_worth_retrying:
          raise
        if waited_s > timeout_s:
          raise SyncerLost(
            f"no syncer answered {what} for {waited_s:.0f} s (limit"
            f" {timeout_s:.0f} s): {error}. Start the syncer, or correct"
            " --syncer."
          ) from error
        if waited_s - said >= _SAY_S:
          said = waited_s
          _log.warning(
            "learner %s waits for the syncer (%s, %.0f of %.0f s): %s",
            self._learner,
            what,
            waited_s,
            timeout_s,
            error,
          )
      if self._is_over():
        return None
      self.pause()
