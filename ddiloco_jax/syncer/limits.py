"""How much callers may ask for at once: joins, transfers, watchers.

What is over a limit is refused at once and told when to ask again; it never
waits on a thread of the server. (docs/security.md)
"""

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

from ddiloco_jax.wire import transfer
from ddiloco_jax.wire.status import ServiceError

_RETRY_S = 1.0
_BURST_S = 10.0  # A whole fleet comes at once, after a restart of the syncer.
_SLOWEST_PUSH_BYTES_PER_S = 1e3  # Far below any link that can train.
_AHEAD = 2  # Messages that are read before they are asked for.


class Rate:
  """A token bucket.

  Args:
    per_s: How often, in the long run; at once ten seconds' worth.
    what: Plural, for the text.
    setting: That has the limit.
  """

  def __init__(
    self,
    per_s: float,
    what: str,
    setting: str,
    now: Callable[[], float] = time.monotonic,
  ):
    self._per_s = per_s
    self._what, self._setting, self._now = what, setting, now
    self._lock = threading.Lock()
    self._left = self._most = max(1.0, _BURST_S * per_s)
    self._at = now()

  def take(self) -> None:
    """Counts one.

    Raises:
      ServiceError: RESOURCE_EXHAUSTED, worth retrying.
    """
    with self._lock:
      now = self._now()
      self._left += (now - self._at) * self._per_s
      self._left, self._at = min(self._left, self._most), now
      if self._left < 1:
        raise ServiceError(
          "RESOURCE_EXHAUSTED",
          f"more than {self._per_s:g} {self._what} a second"
          f" ({self._setting}), and {self._most:g} at once. Ask again in"
          f" {_RETRY_S:g} s, or raise the limit at the syncer.",
          retry_after_s=_RETRY_S,
        )
      self._left -= 1


class Slots:
  """A number of things that may be open at once.

  Args:
    limit: In all.
    what: Plural, for the text.
    setting: That has the limit.
    each: Of one caller.
    each_setting: Likewise.
  """

  def __init__(
    self,
    limit: int,
    what: str,
    setting: str,
    each: int | None = None,
    each_setting: str = "",
  ):
    self._limit, self._each = limit, limit if each is None else each
    self._what = what
    self._setting, self._each_setting = setting, each_setting
    self._lock = threading.Lock()
    self._open: collections.Counter[str] = collections.Counter()

  @contextlib.contextmanager
  def one(self, caller: str = "") -> Iterator[None]:
    """Is open while the context is.

    Raises:
      ServiceError: RESOURCE_EXHAUSTED, worth retrying.
    """
    with self._lock:
      if self._open[caller] >= self._each:
        raise self._refusal(
          f"of learner {caller!r} " if caller else "",
          self._each,
          self._each_setting or self._setting,
        )
      if self._open.total() >= self._limit:
        raise self._refusal("", self._limit, self._setting)
      self._open[caller] += 1
    try:
      yield
    finally:
      with self._lock:
        self._open[caller] -= 1
        if not self._open[caller]:
          del self._open[caller]

  def _refusal(self, whose: str, limit: int, setting: str) -> ServiceError:
    return ServiceError(
      "RESOURCE_EXHAUSTED",
      f"{limit} {self._what} {whose}are open, which is the limit ({setting})."
      f" End one, or ask again in {_RETRY_S:g} s.",
      retry_after_s=_RETRY_S,
    )


@contextlib.contextmanager
def moving(
  stream: Iterator[transfer.Part], timeout_s: float
) -> Iterator[Iterator[transfer.Part]]:
  """A push that is given up once too few bytes have come for so long.

  Too few are less than a slowest rate brings in that time; what ends the push
  may come before. Its iterator raises ServiceError, UNAVAILABLE, then; empty
  chunks are left out of it, and the time that its reader takes is not counted.
  A thread reads a little ahead of it.
  """
  enough = max(1.0, timeout_s * _SLOWEST_PUSH_BYTES_PER_S)
  read: queue.Queue = queue.Queue(_AHEAD)
  over = threading.Event()

  def hand_over(item: object) -> None:
    while not over.is_set():
      with contextlib.suppress(queue.Full):
        return read.put(item, timeout=1.0)

  def take_all() -> None:
    try:
      for item in stream:
        hand_over((item,))
        if over.is_set():
          return
      hand_over(None)
    except BaseException as error:
      hand_over(error)

  def parts() -> Iterator[transfer.Part]:
    num_bytes, left_s = 0, timeout_s
    while True:
      begin = time.monotonic()
      try:
        if left_s <= 0:
          raise queue.Empty
        said = read.get(timeout=left_s)
      except queue.Empty:
        raise ServiceError(
          "UNAVAILABLE",
          f"{num_bytes} bytes of a transfer came in {timeout_s:g} s"
          " (wire.progress_timeout_s at the syncer), which is too few; nothing"
          " of it is kept. Send it again.",
        ) from None
      if said is None:
        return
      if isinstance(said, BaseException):
        raise said
      (part,) = said
      left_s -= time.monotonic() - begin
      if not isinstance(part, transfer.Message):
        num_bytes += len(part)
        if not len(part):
          continue
      if num_bytes >= enough:
        num_bytes, left_s = 0, timeout_s
      yield part

  threading.Thread(target=take_all, name="reads-upload", daemon=True).start()
  try:
    yield parts()
  finally:
    over.set()
