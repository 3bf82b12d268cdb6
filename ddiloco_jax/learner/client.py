"""The syncer's service as a learner calls it over gRPC.

Control and bulk have a connection each, so that a slow upload delays no
report. Nothing is repeated here: whoever calls knows what a repetition means.
(arXiv 2604.21428, Sec. 3.)
"""

import collections
import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc

from ddiloco_jax.protocol import events
from ddiloco_jax.wire import (
  headers,
  messages,
  methods,
  options,
  port,
  tls,
  tokens,
  transfer,
)
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError, from_grpc

_GOODBYE_S = 1.0  # How long an ended stream may take to deliver a goodbye.


class Client:
  """Implements `wire.port.Synchronizer` over gRPC.

  Args:
    addresses: HOST:PORT of the syncer, or several under which it may be
      found: where one is not reached, the next call tries the next one.
    cfg: The wire's settings; chunk_bytes and formats come from the run.
    learner: Whose token is sent; None: an admin's, if there is one.

  Raises:
    ValueError: no address; a token or certificate that cannot be used, or that
      would be said where others could read along.
  """

  def __init__(
    self,
    addresses: str | Sequence[str],
    cfg: options.WireConfig | None = None,
    learner: str | None = None,
  ):
    self._addresses = (
      (addresses,) if isinstance(addresses, str) else tuple(addresses)
    )
    if not all(self._addresses) or not self._addresses:
      raise ValueError(
        f"Addresses of the syncer are {self._addresses}; one or more of the"
        " form HOST:PORT are needed (--syncer)."
      )
    self._cfg = cfg or options.WireConfig()
    known = tokens.read_tokens(self._cfg)
    self._token = (
      known.of_onlooker() if learner is None else known.of_learner(learner)
    )
    self._peer_token = known.of_peer()
    for address in self._addresses:
      tls.check_may_send(address, self._cfg, self._token)
    tls.channel_credentials(self._cfg)  # Fails now, not at a call.
    self._has_answered = False
    self._up = transfer.Pace(self._cfg.bandwidth_bytes_per_s)
    self._down = transfer.Pace(self._cfg.bandwidth_bytes_per_s)
    self._lock = threading.Lock()
    self._current = 0
    self._channels: dict[tuple[int, str], grpc.Channel] = {}
    self._closed = False

  def get_run(self) -> port.RunSpec:
    return messages.run_from_pb(self._ask("GetRun", pb.GetRunRequest()))

  def join(self, hello: port.Hello) -> "ControlStream":
    """Opens a control stream; what is wrong with hello, its notices raise."""
    return ControlStream(self._call("Join"), hello, self._faults)

  def push(
    self, header: port.ReplyHeader, chunks: Iterable[bytes | memoryview]
  ) -> port.PushResult:
    """Sends one reply and returns what the syncer makes of it.

    Raises:
      ServiceError: a fault of this caller, or of the transport.
    """
    parts = transfer.send(
      pb.PushChunk, headers.reply_header_to_pb(header), chunks, pace=self._up
    )
    with self._faults():
      answer = self._call("PushFragment", "bulk")(parts)
    return headers.push_result_from_pb(answer)

  def fetch(
    self, session: port.Session, fragment: int, n: int, exact: bool
  ) -> tuple[port.FragmentHeader, bytearray]:
    """A published version; its buffer belongs to the caller.

    Raises:
      ServiceError: a fault of this caller, or of the transport.
    """
    request = headers.fetch_to_pb(session, fragment, n, exact)
    with self._faults():
      parts = self._call("FetchFragment", "bulk")(request)
      try:
        header = headers.fragment_header_from_pb(transfer.receive_header(parts))
        return header, transfer.collect(parts, header.num_bytes, self._down)
      finally:
        parts.cancel()  # Whatever is left of it.

  def open_state(
    self, request: pb.FetchStateRequest, address: str
  ) -> "StateCall":
    """Opens the transfer of a peer's state.

    Args:
      address: HOST:PORT of the peer; "": by way of the syncer.
    """
    if not address:
      call = self._call("RelayState", "bulk")(request)
      return StateCall(call, self._addresses[self._current], lambda: None)
    channel = self._open_to_peer(address)
    call = methods.make_call(
      channel,
      "FetchState",
      methods.PEER,
      tokens.as_metadata(self._peer_token),
    )(request)
    return StateCall(call, address, channel.close)

  def status(self) -> pb.Status:
    """How the run stands, as the message that the syncer serves."""
    return self._ask("GetStatus", pb.GetStatusRequest())

  def watch(self, interval_s: float) -> Iterator[pb.Status]:
    """How the run stands, again and again until it ends."""
    with self._faults():
      call = self._call("WatchStatus")(
        pb.WatchStatusRequest(interval_s=interval_s)
      )
      try:
        yield from call
      finally:
        call.cancel()

  def drain(self, reason: str) -> None:
    """Asks the syncer to end the run in order."""
    self._ask("Drain", pb.DrainRequest(reason=reason))

  def evict(self, learner: str, reason: str) -> int:
    """Shuts a learner's process out; returns its incarnation."""
    request = pb.EvictRequest(learner_id=learner, reason=reason)
    return self._ask("Evict", request).incarnation

  def take_snapshot(self) -> pb.TakeSnapshotReply:
    """Takes a consistent cut of the run; returns once it is on disk."""
    return self._ask("TakeSnapshot", pb.TakeSnapshotRequest())

  def close(self) -> None:
    """Ends all calls and connections."""
    with self._lock:
      self._closed = True
      channels, self._channels = self._channels, {}
    for channel in channels.values():
      channel.close()

  def _ask(self, name: str, request: Any) -> Any:
    """A call that moves no fragment.

    Raises:
      ServiceError: a fault of this caller, or of the transport.
    """
    with self._faults():
      return self._call(name)(request, timeout=self._cfg.call_timeout_s)

  def _call(self, name: str, connection: str = "control") -> Any:
    with self._lock:
      if self._closed:
        raise ServiceError("UNAVAILABLE", "this client was closed.")
      key = self._current, connection
      channel = self._channels.get(key)
      if channel is None:
        address = self._addresses[self._current]
        channel = tls.open_channel(address, self._cfg, self._token)
        self._channels[key] = channel
    metadata = tokens.as_metadata(self._token)
    return methods.make_call(channel, name, metadata=metadata)

  def _open_to_peer(self, address: str) -> grpc.Channel:
    try:
      return tls.open_channel(address, self._cfg, self._peer_token)
    except ValueError as error:
      raise ServiceError("FAILED_PRECONDITION", str(error)) from error

  @contextlib.contextmanager
  def _faults(self) -> Iterator[None]:
    """Turns gRPC's errors into the service's own."""
    address = self._addresses[self._current]
    try:
      yield
      self._has_answered = True
    except grpc.RpcError as error:
      fault = from_grpc(error, address)
      if fault.is_worth_retrying:
        self._check_tls(address)
        with self._lock:
          self._current = (self._current + 1) % len(self._addresses)
      raise fault from error

  def _check_tls(self, address: str) -> None:
    """Says why TLS fails, if that is why there was never an answer; later, a
    new certificate may come any time, and it is worth trying again.

    Raises:
      ServiceError: UNAUTHENTICATED.
    """
    if self._has_answered:
      return
    cause = tls.diagnose(address, self._cfg)
    if cause:
      raise ServiceError("UNAUTHENTICATED", cause)


class StateCall:
  """The parts of a state under way; its faults are the service's own."""

  def __init__(self, call: Any, address: str, close: Any):
    self._call = call
    self._address = address
    self._close = close

  def __iter__(self) -> Iterator[transfer.Part]:
    try:
      yield from self._call
    except grpc.RpcError as error:
      raise from_grpc(error, self._address) from error

  def cancel(self) -> None:
    """Ends the call and its connection, if it has one of its own."""
    self._call.cancel()
    self._close()


class ControlStream:
  """Implements `wire.port.Control` over one call of Join."""

  def __init__(self, call: Any, hello: port.Hello, faults: Any):
    self._learner = hello.learner
    self._faults = faults
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
      with self._faults():
        for message in self._call:
          stamped = messages.notice_from_pb(message, self._learner)
          if stamped is not None:
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
