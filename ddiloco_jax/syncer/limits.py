"""How much callers may ask for at once: joins, transfers, watchers.

What is over a limit is refused at once and told when to ask again; it never
waits on a thread of the server. (docs/security.md)
"""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator

from ddiloco_jax.wire import transfer
from ddiloco_jax.wire.status import ServiceError

_RETRY_S = 1.0
_BURST_S = 10.0  # A whole fleet comes at once, after a restart of the syncer.
_SLOWEST_BYTES_PER_S = 1e3  # Far below any link that can train.
_AHEAD = 2  # Messages that are read before they are asked for.
_LOOKS = 20  # At a transfer that may stand still, in the time that it is given.


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
    num_callers: Of so many, whoever has none open is kept a place for one.
  """

  def __init__(
    self,
    limit: int,
    what: str,
    setting: str,
    each: int | None = None,
    each_setting: str = "",
    num_callers: int = 0,
  ):
    self._limit, self._each = limit, limit if each is None else each
    self._what = what
    self._setting, self._each_setting = setting, each_setting
    self._num_callers = num_callers
    self._lock = threading.Lock()
    # Caller -> what ends each of the things that it has open.
    self._open: dict[str, list[Callable[[], object]]] = {}

  @contextlib.contextmanager
  def one(
    self, caller: str = "", end: Callable[[], object] = lambda: None
  ) -> Iterator[None]:
    """Is open while the context is.

    Args:
      caller: Whose it is.
      end: What `end` is to call as long as it is open.

    Raises:
      ServiceError: RESOURCE_EXHAUSTED, worth retrying.
    """
    with self._lock:
      mine = self._open.get(caller, [])
      if len(mine) >= self._each:
        raise self._refusal(
          f"of learner {caller!r} " if caller else "",
          self._each,
          self._each,
          self._each_setting or self._setting,
        )
      total = sum(map(len, self._open.values()))
      kept = self._num_callers - len(self._open) if mine else 0
      if total + max(0, kept) >= self._limit:
        raise self._refusal("", total, self._limit, self._setting, kept)
      self._open[caller] = [*mine, end]
    try:
      yield
    finally:
      with self._lock:
        mine = self._open.pop(caller)
        mine.remove(end)
        if mine:
          self._open[caller] = mine

  def end(self, caller: str) -> None:
    """Ends all that a caller has open."""
    with self._lock:
      ends = tuple(self._open.get(caller, ()))
    for end in ends:
      end()

  def _refusal(
    self, whose: str, num: int, limit: int, setting: str, kept: int = 0
  ) -> ServiceError:
    rest = f", {kept} of it for callers that have none open" if kept > 0 else ""
    return ServiceError(
      "RESOURCE_EXHAUSTED",
      f"{num} {self._what} {whose}are open; {limit} is the limit"
      f" ({setting}){rest}. End one, or ask again in {_RETRY_S:g} s.",
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
  enough = max(1.0, timeout_s * _SLOWEST_BYTES_PER_S)
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


@contextlib.contextmanager
def taken(
  parts: Iterator[transfer.Part], timeout_s: float, end: Callable[[], object]
) -> Iterator[Iterator[transfer.Part]]:
  """A transfer to a caller that is ended once it takes too little for so long.

  Too little is as in `moving`. Only the time that the caller takes is counted:
  a thread looks at it, for the one that sends is blocked.
  """
  enough = max(1.0, timeout_s * _SLOWEST_BYTES_PER_S)
  over = threading.Event()
  left_s, sent_at = timeout_s, math.inf  # inf: nothing waits to be taken.

  def give() -> Iterator[transfer.Part]:
    nonlocal left_s, sent_at
    num_bytes = 0
    for part in parts:
      sent_at = time.monotonic()
      yield part
      left_s, sent_at = left_s - (time.monotonic() - sent_at), math.inf
      num_bytes += 0 if isinstance(part, transfer.Message) else len(part)
      if num_bytes >= enough:
        num_bytes, left_s = 0, timeout_s

  def watch() -> None:
    while not over.wait(timeout_s / _LOOKS):
      if time.monotonic() - sent_at > left_s:
        end()
        return

  threading.Thread(target=watch, name="watches-fetch", daemon=True).start()
  try:
    yield give()
  finally:
    over.set()
