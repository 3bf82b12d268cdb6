"""The syncer's service as a learner calls it over gRPC.

Control and bulk have a connection each, so that a slow upload delays no
report. Nothing is repeated here: whoever calls knows what a repetition means.
(arXiv 2604.21428, Sec. 3.)
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from ddiloco_jax.learner.calls import ControlStream, StateCall
from ddiloco_jax.wire import (
  headers,
  listening,
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

_log = logging.getLogger(__name__)


class Client:
  """Implements `wire.port.Synchronizer` over gRPC.

  Args:
    addresses: HOST:PORT of the syncer, or several under which it may be
      found: where one is not reached, or serves an older epoch than this
      client has seen, the next call tries the next one.
    cfg: The wire's settings; chunk_bytes and formats come from the run.
    learner: Whose token is sent; ONLOOKER: an admin's, if there is one.

  Raises:
    ValueError: no address; a token or certificate that cannot be used, or that
      would be said where others could read along.
  """

  def __init__(
    self,
    addresses: str | Sequence[str],
    cfg: options.WireConfig | None = None,
    *,
    learner: str | tokens.Onlooker,
  ):
    self._addresses = (
      (addresses,) if isinstance(addresses, str) else tuple(addresses)
    )
    if not all(self._addresses) or not self._addresses:
      raise ValueError(
        f"Addresses of the syncer are {self._addresses}; one or more of the"
        " form HOST:PORT are needed (--syncer)."
      )
    self._addresses = tuple(map(listening.dialled, self._addresses))
    self._cfg = cfg or options.WireConfig()
    known = tokens.read_tokens(self._cfg)
    self._token = (
      known.of_onlooker()
      if isinstance(learner, tokens.Onlooker)
      else known.of_learner(learner)
    )
    self._known = known
    for address in self._addresses:
      tls.check_may_send(address, self._cfg, self._token)
    self._credentials = tls.channel_credentials(self._cfg)
    self._has_answered = False
    self._is_welcome = False  # As a learner, at some time.
    self._causes: dict[int, str] = {}  # Address -> why it does not serve.
    self._up = transfer.Pace(self._cfg.bandwidth_bytes_per_s)
    self._down = transfer.Pace(self._cfg.bandwidth_bytes_per_s)
    self._lock = threading.Lock()
    self._current = 0
    self._epoch = 0  # The newest that was seen.
    self._channels: dict[tuple[int, str], grpc.Channel] = {}
    self._closed = False

  def get_run(self) -> port.RunSpec:
    at = self._current
    run = messages.run_from_pb(self._ask("GetRun", pb.GetRunRequest(), at))
    self._check_epoch(run.epoch, at)
    return run

  def join(self, hello: port.Hello) -> ControlStream:
    """Opens a control stream; what is wrong with hello, its notices raise."""
    at = self._current

    @contextlib.contextmanager
    def checked() -> Iterator[Callable[[port.Notice], None]]:
      with self._faults(at):
        yield lambda notice: self._check_welcome(notice, at)

    return ControlStream(self._call("Join", at), hello, checked)

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
    at = self._current
    with self._faults(at, of_session=True):
      answer = self._call("PushFragment", at, "bulk")(parts)
    return headers.push_result_from_pb(answer)

  def fetch(
    self, session: port.Session, fragment: int, n: int, exact: bool
  ) -> tuple[port.FragmentHeader, bytearray]:
    """A published version; its buffer belongs to the caller.

    Raises:
      ServiceError: a fault of this caller, or of the transport.
    """
    request = headers.fetch_to_pb(session, fragment, n, exact)
    at = self._current
    with self._faults(at, of_session=True):
      parts = self._call("FetchFragment", at, "bulk")(request)
      try:
        header = headers.fragment_header_from_pb(transfer.receive_header(parts))
        return header, transfer.collect(parts, header.num_bytes, self._down)
      finally:
        parts.cancel()  # Whatever is left of it.

  def open_state(
    self, request: pb.FetchStateRequest, address: str
  ) -> StateCall:
    """Opens the transfer of a peer's state.

    Args:
      address: HOST:PORT of the peer; "": by way of the syncer.
    """
    if not address:
      at = self._current
      call = self._call("RelayState", at, "bulk")(request)
      syncer = self._addresses[at]
      return StateCall(call, lambda error: from_grpc(error, syncer))
    token = self._known.of_donor(request.donor_id)
    channel = self._open_to_peer(address, token)
    call = methods.make_call(
      channel, "FetchState", methods.PEER, tokens.as_metadata(token)
    )(request)
    return StateCall(
      call, lambda error: tls.fault(error, address, self._cfg), channel.close
    )

  def status(self) -> pb.Status:
    """How the run stands, as the message that the syncer serves."""
    return self._ask("GetStatus", pb.GetStatusRequest(), self._current)

  def watch(self, interval_s: float) -> Iterator[pb.Status]:
    """How the run stands, again and again until it ends."""
    at = self._current
    with self._faults(at):
      call = self._call("WatchStatus", at)(
        pb.WatchStatusRequest(interval_s=interval_s)
      )
      try:
        yield from call
      finally:
        call.cancel()

  def drain(self, reason: str) -> None:
    """Asks the syncer to end the run in order."""
    self._ask("Drain", pb.DrainRequest(reason=reason), self._current)

  def evict(self, learner: str, reason: str) -> int:
    """Shuts a learner's process out; returns its incarnation."""
    request = pb.EvictRequest(learner_id=learner, reason=reason)
    return self._ask("Evict", request, self._current).incarnation

  def take_snapshot(self) -> pb.TakeSnapshotReply:
    """Takes a consistent cut of the run; returns once it is on disk."""
    request = pb.TakeSnapshotRequest()
    return self._ask("TakeSnapshot", request, self._current)

  def close(self) -> None:
    """Ends all calls and connections."""
    with self._lock:
      self._closed = True
      channels, self._channels = self._channels, {}
    for channel in channels.values():
      channel.close()

  def _ask(self, name: str, request: Any, at: int) -> Any:
    """A call that moves no fragment, to one of the addresses.

    Raises:
      ServiceError: a fault of this caller, or of the transport.
    """
    with self._faults(at):
      return self._call(name, at)(request, timeout=self._cfg.call_timeout_s)

  def _call(self, name: str, at: int, connection: str = "control") -> Any:
    with self._lock:
      if self._closed:
        raise ServiceError("UNAVAILABLE", "this client was closed.")
      key = at, connection
      channel = self._channels.get(key)
      if channel is None:
        address = self._addresses[at]
        channel = self._open(address, self._token)
        self._channels[key] = channel
    metadata = tokens.as_metadata(self._token)
    return methods.make_call(channel, name, metadata=metadata)

  def _open_to_peer(
    self, address: str, token: tokens.Token | None
  ) -> grpc.Channel:
    try:
      return self._open(address, token)
    except ValueError as error:
      raise ServiceError("FAILED_PRECONDITION", str(error)) from error

  def _open(self, address: str, token: tokens.Token | None) -> grpc.Channel:
    """A connection, with what the files hold now, or last held.

    Raises:
      ValueError: the token would be said where others could read along.
    """
    try:
      self._credentials = tls.channel_credentials(self._cfg)
    except ValueError as error:  # It may be being written.
      _log.warning("%s What was read before is used.", error)
    return tls.open_channel(address, self._cfg, token, self._credentials)

  @contextlib.contextmanager
  def _faults(self, at: int, *, of_session: bool = False) -> Iterator[None]:
    """Turns gRPC's errors at an address into the service's own.

    Args:
      of_session: Of a call that shows a session's secret.
    """
    try:
      yield
      self._has_answered = True
    except grpc.RpcError as error:
      fault = from_grpc(error, self._addresses[at])
      raise self._judge(fault, at, of_session=of_session) from error

  def _judge(
    self, fault: ServiceError, at: int, *, of_session: bool
  ) -> ServiceError:
    """What a fault at an address means among the others: where TLS or a token
    is why, another address may be right, or its settings may be mended.

    Returns:
      UNAUTHENTICATED: every address refuses this process, or is refused, and
        none has ever let it in; or the session is not current.
    """
    is_refusal = fault.code == "UNAUTHENTICATED"
    if not (is_refusal or fault.is_worth_retrying):
      return fault
    cause, was_in = self._cause(fault, at), self._has_answered
    if is_refusal and not cause:
      if of_session:
        return fault  # Its control stream knows more.
      # Whose token is bound to another id is answered, and never welcome.
      cause, was_in = fault.text, self._is_welcome
    if self._is_hopeless(at, cause, was_in=was_in):
      return ServiceError("UNAUTHENTICATED", cause)
    self._leave(at)
    return ServiceError("UNAVAILABLE", cause) if cause else fault

  def _cause(self, fault: ServiceError, at: int) -> str:
    """Why no TLS comes about with an address, where that may be the fault."""
    if fault.code == "UNAUTHENTICATED":
      may_be_tls = bool(self._cfg.tls_ca)
    else:
      may_be_tls = not self._has_answered or tls.may_be_why(fault.text)
    if not may_be_tls:
      return ""
    return tls.diagnose(self._addresses[at], self._cfg) or ""

  def _is_hopeless(self, at: int, cause: str, *, was_in: bool) -> bool:
    """Notes why an address does not serve this process ("": for no reason that
    lasts), and says so; whether none of them does, or ever did."""
    with self._lock:
      is_news = cause and self._causes.get(at) != cause
      self._causes.pop(at, None)
      if cause:
        self._causes[at] = cause
      is_over = len(self._causes) == len(self._addresses)
    if is_over and not was_in:
      return True
    if is_news:
      _log.warning("%s It is tried again, as are other addresses.", cause)
    return False

  def _leave(self, at: int) -> None:
    """Has the next call try another address, unless one has done so already."""
    with self._lock:
      if self._current == at:
        self._current = (at + 1) % len(self._addresses)

  def _check_welcome(self, notice: port.Notice, at: int) -> None:
    if isinstance(notice, port.Welcomed):
      self._check_epoch(notice.epoch, at)
      self._is_welcome = True

  def _check_epoch(self, epoch: int, at: int) -> None:
    """Refuses a syncer that another one has taken over from.

    Raises:
      ServiceError: UNAVAILABLE: it is worth trying the next address.
    """
    with self._lock:
      self._epoch = max(self._epoch, epoch)
      newest = self._epoch
    if epoch < newest:
      self._leave(at)
      raise ServiceError(
        "UNAVAILABLE",
        f"the syncer at {self._addresses[at]} serves epoch {epoch}, and this"
        f" client has seen epoch {newest}: another syncer has taken over from"
        " it. Stop it; the next address is tried.",
      )
