"""One learner's control stream, on the syncer's side."""

import contextlib
import queue
from collections.abc import Callable, Iterator

from ddiloco_jax.protocol import events
from ddiloco_jax.syncer.errors import Stopping
from ddiloco_jax.wire import port


class Control:
  """Notices for one learner, in order; its messages go to `receive`.

  Args:
    receive: Takes the events that the learner says.
    stamp: The newest stamp, for notices that are made here.
    heartbeat_s: Longest silence towards the learner.
  """

  def __init__(
    self,
    receive: Callable[[port.Upward | events.Disconnected], object],
    stamp: Callable[[], port.Stamp],
    heartbeat_s: float,
  ):
    self._receive = receive
    self._stamp = stamp
    self._heartbeat_s = heartbeat_s
    self._notices: queue.SimpleQueue = queue.SimpleQueue()
    self._ended = False
    self.session: port.Session | None = None

  def send(self, message: port.Upward) -> None:
    """Hands a message of the learner to the syncer.

    Raises:
      ServiceError: what is wrong with it.
    """
    self._receive(message)

  def notices(self) -> Iterator[tuple[port.Stamp, port.Notice]]:
    """Blocks for the next notice; a heartbeat breaks a long silence.

    Raises:
      ServiceError: why the syncer ended the stream, if it did.
    """
    while True:
      try:
        notice = self._notices.get(timeout=self._heartbeat_s)
      except queue.Empty:
        notice = (self._stamp(), port.HeartbeatNotice())
      if notice is None:
        return
      if isinstance(notice, BaseException):
        raise notice
      yield notice

  def close(self) -> None:
    """The learner's end of the stream is gone, without a goodbye."""
    if self.session and not self._ended:
      with contextlib.suppress(Stopping):
        self._receive(events.Disconnected())
    self.end()

  def tell(self, stamp: port.Stamp, notice: port.Notice) -> None:
    """Queues a notice; never waits."""
    self._notices.put((stamp, notice))

  def end(self, error: BaseException | None = None) -> None:
    """Ends the stream after what is queued, with an error if one is given."""
    if not self._ended:
      self._ended = True
      self._notices.put(error)
