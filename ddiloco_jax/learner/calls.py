"""Calls of a learner that are under way: a control stream, a peer's state."""

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from ddiloco_jax.protocol import events
from ddiloco_jax.wire import messages, port, transfer
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError

_GOODBYE_S = 1.0  # How long an ended stream may take to deliver a goodbye.


class StateCall:
  """The parts of a state under way; its faults are the service's own.

  Args:
    judge: What an error of the call is.
    close: Ends the connection, if it has one of its own.
  """

  def __init__(
    self,
    call: Any,
    judge: Callable[[grpc.RpcError], ServiceError],
    close: Callable[[], None] = lambda: None,
  ):
    self._call = call
    self._judge = judge
    self._close = close

  def __iter__(self) -> Iterator[transfer.Part]:
    try:
      yield from self._call
    except grpc.RpcError as error:
      raise self._judge(error) from error

  def cancel(self) -> None:
    """Ends the call and its connection, if it has one of its own."""
    self._call.cancel()
    self._close()


class ControlStream:
  """Implements `wire.port.Control` over one call of Join."""

  def __init__(self, call: Any, hello: port.Hello, checked: Any):
    self._learner = hello.learner
    self._checked = checked  # Gives what refuses a notice; turns errors.
    self._changed = threading.Condition()
    self._queue: collections.deque[port.Hello | port.Upward] = (
      collections.deque((hello,))
    )
    self._said_goodbye = False
    self._closed = False
    self._over = threading.Event()
    self._call = call(self._messages())
    if not self._call.add_callback(self._end):
      self._end()

  def send(self, message: port.Upward) -> None:
    """Queues a message; a report that was not sent yet gives way to a newer."""
    with self._changed:
      if self._said_goodbye or self._over.is_set():
        return
      self._said_goodbye = isinstance(message, events.Left)
      last = self._queue[-1] if self._queue else None
      if isinstance(message, events.Heard) and last is not None:
        return  # What waits will be heard as well.
      if isinstance(message, events.Reported) and type(last) is type(message):
        self._queue.pop()
      self._queue.append(message)
      self._changed.notify()

  def notices(self) -> Iterator[tuple[port.Stamp, port.Notice]]:
    try:
      with self._checked() as check:
        for message in self._call:
          stamped = messages.notice_from_pb(message, self._learner)
          if stamped is not None:
            check(stamped[1])
            yield stamped
    except ServiceError:
      if not self._closed:
        raise

  def close(self) -> None:
    with self._changed:
      self._closed = True
      said_goodbye = self._said_goodbye
    if said_goodbye:
      self._over.wait(_GOODBYE_S)  # The syncer answers it with the end.
    self._call.cancel()

  def _messages(self) -> Iterator[pb.LearnerMessage]:
    """What goes up; read by a thread of the call, and ends with it."""
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._queue or self._over.is_set())
        if self._over.is_set():
          return
        message = self._queue.popleft()
      yield messages.upward_to_pb(message)
      if isinstance(message, events.Left):
        return

  def _end(self) -> None:
    with self._changed:
      self._over.set()
      self._changed.notify_all()
