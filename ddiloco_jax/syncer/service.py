"""The syncer's servicer: it translates between messages and calls, no more.

(arXiv 2604.21428, Sec. 3.)
"""

import contextlib
import threading
from collections.abc import Collection, Iterator
from typing import Protocol

import grpc

from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.status import Status
from ddiloco_jax.syncer import limits
from ddiloco_jax.syncer.errors import Stopping
from ddiloco_jax.syncer.relay import Relay
from ddiloco_jax.wire import (
  codec,
  fields,
  headers,
  messages,
  options,
  port,
  standing,
  tokens,
  transfer,
)
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError, abort


class Served(port.Synchronizer, Protocol):
  """What a service carries: a Synchronizer that is also operated."""

  @property
  def max_learners(self) -> int: ...

  def status(self) -> Status: ...

  def request_stop(self, reason: str) -> None: ...

  def evict(self, learner: str, reason: str) -> int: ...

  def donor_for(
    self, session: port.Session, preferred: str, but_not: Collection[str]
  ) -> events.Donor: ...

  def take_snapshot(self) -> events.SnapshotOver: ...


class Service:
  """The methods of ddiloco.v1.Synchronizer over a `Served`.

  Args:
    synchronizer: Whom it asks.
    cfg: Its limits.
    gate: Knows which ids a token is good for.
    relay: For states of peers.
  """

  def __init__(
    self,
    synchronizer: Served,
    cfg: options.WireConfig,
    gate: tokens.Gate,
    relay: Relay,
  ):
    self._synchronizer = synchronizer
    self._cfg = cfg
    self._joins = limits.Rate(cfg.joins_per_s, "joins", "wire.joins_per_s")
    self._transfers = limits.Slots(
      cfg.max_calls // 2,
      "transfers",
      "half of wire.max_calls",
      cfg.max_transfers_per_learner,
      "wire.max_transfers_per_learner",
      synchronizer.max_learners,
    )
    self._watchers = limits.Slots(
      cfg.max_watchers, "WatchStatus streams", "wire.max_watchers"
    )
    self._gate = gate
    self._relay = relay

  def GetRun(self, request: pb.GetRunRequest, context) -> pb.Run:
    with _faults(context):
      return messages.run_to_pb(self._synchronizer.get_run())

  def Join(
    self, requests: Iterator[pb.LearnerMessage], context
  ) -> Iterator[pb.SyncerMessage]:
    with _faults(context):
      hello = _receive_hello(requests)
      self._joins.take()
      self._gate.check_learner(context.invocation_metadata(), hello.learner)
      control = self._synchronizer.join(hello)
      upward = _Upward(requests, control)
      if not context.add_callback(control.close):
        control.close()  # It went away in between.
      upward.start()
      for stamp, notice in control.notices():
        yield messages.notice_to_pb(stamp, self._relay.introduce(notice))
      if upward.error:
        raise upward.error

  def PushFragment(
    self, parts: Iterator[transfer.Part], context
  ) -> pb.PushOutcome:
    with _faults(context):
      header = transfer.receive_header(parts)
      with (
        self._transfers.one(header.learner_id, context.cancel),
        limits.moving(parts, self._cfg.progress_timeout_s) as moving,
      ):
        result = self._synchronizer.push(
          headers.reply_header_from_pb(header),
          transfer.receive_chunks(moving, header.num_bytes),
        )
      return headers.push_result_to_pb(result)

  def FetchFragment(
    self, request: pb.FetchRequest, context
  ) -> Iterator[transfer.Part]:
    one = self._transfers.one(request.learner_id, context.cancel)
    with _faults(context), one:
      chunk_bytes = self._synchronizer.get_run().chunk_bytes
      header, data = self._synchronizer.fetch(*headers.fetch_from_pb(request))
      parts = transfer.send(
        pb.FetchChunk,
        headers.fragment_header_to_pb(header),
        codec.chunks(data, chunk_bytes),
        header.crc32,
      )
      patience_s = self._cfg.progress_timeout_s
      with limits.taken(parts, patience_s, context.cancel) as taken:
        yield from taken

  def RelayState(
    self, request: pb.FetchStateRequest, context
  ) -> Iterator[transfer.Part]:
    with _faults(context):
      session = fields.session_from_pb("FetchStateRequest", request)
      fields.check_length("FetchStateRequest.but_not", request.but_not)
      donor = self._synchronizer.donor_for(
        session, request.donor_id, request.but_not
      )
      yield from self._relay.stream(request, donor, context)

  def GetStatus(self, request: pb.GetStatusRequest, context) -> pb.Status:
    with _faults(context):
      return standing.status_to_pb(self._synchronizer.status())

  def WatchStatus(
    self, request: pb.WatchStatusRequest, context
  ) -> Iterator[pb.Status]:
    with _faults(context), self._watchers.one():
      interval_s = _interval_s(request)
      gone = threading.Event()
      if not context.add_callback(gone.set):
        return  # It has gone already.
      while not gone.is_set():
        status = self._synchronizer.status()
        yield standing.status_to_pb(status)
        if status.phase == "finished":
          return
        gone.wait(interval_s)

  def Drain(self, request: pb.DrainRequest, context) -> pb.DrainReply:
    with _faults(context):
      self._synchronizer.request_stop(
        f"drained by an admin: {_reason(request)}"
      )
      return pb.DrainReply()

  def Evict(self, request: pb.EvictRequest, context) -> pb.EvictReply:
    with _faults(context):
      learner = fields.learner_from_pb("Evict.learner_id", request.learner_id)
      incarnation = self._synchronizer.evict(
        learner, f"by an admin: {_reason(request)}"
      )
      self._transfers.end(learner)
      self._relay.end(learner)
      return pb.EvictReply(incarnation=incarnation)

  def TakeSnapshot(
    self, request: pb.TakeSnapshotRequest, context
  ) -> pb.TakeSnapshotReply:
    with _faults(context):
      return messages.snapshot_to_pb(self._synchronizer.take_snapshot())


class _Upward(threading.Thread):
  """Hands what a learner says on its control stream to its Control.

  Attributes:
    error: What was wrong, with it or here, if that ended the stream.
  """

  def __init__(
    self, requests: Iterator[pb.LearnerMessage], control: port.Control
  ):
    super().__init__(name="learner-messages", daemon=True)
    self._requests = requests
    self._control = control
    self.error: BaseException | None = None

  def run(self) -> None:
    try:
      for request in self._requests:
        message = messages.upward_from_pb(request)
        if isinstance(message, port.Hello):
          raise ServiceError(
            "INVALID_ARGUMENT",
            "a second Hello on one control stream; open another stream.",
          )
        self._control.send(message)
        if isinstance(message, events.Left):
          return  # The syncer ends the stream.
    except grpc.RpcError:
      pass  # The stream broke: that is what close says.
    except BaseException as error:
      self.error = error  # Raised by the thread that answers the call.
    finally:
      self._control.close()


@contextlib.contextmanager
def _faults(context) -> Iterator[None]:
  """Ends the call with the code and text of a ServiceError."""
  try:
    yield
  except ServiceError as error:
    abort(context, error)
  except Stopping as error:
    text = f"this syncer stops: {error} Try again, or the next address."
    abort(context, ServiceError("UNAVAILABLE", text))


def _receive_hello(requests: Iterator[pb.LearnerMessage]) -> port.Hello:
  first = next(requests, None)
  hello = messages.upward_from_pb(first) if first is not None else None
  if not isinstance(hello, port.Hello):
    said = first.WhichOneof("message") if first is not None else "nothing"
    raise ServiceError(
      "INVALID_ARGUMENT",
      f"a control stream opened with {said}; it must open with hello.",
    )
  return hello


def _reason(request: pb.DrainRequest | pb.EvictRequest) -> str:
  """Why an admin wants it, as the records tell it."""
  return fields.said_from_pb(request.reason) or "no reason was given"


def _interval_s(request: pb.WatchStatusRequest) -> float:
  interval_s = request.interval_s or 1.0
  if not 0.1 <= interval_s <= 3600:
    raise ServiceError(
      "INVALID_ARGUMENT",
      f"interval_s is {interval_s}; it is in 0.1..3600, or 0 for 1.",
    )
  return interval_s
