"""A peer's state by way of the syncer, for who cannot reach the peer itself.

Parts pass through as they come, checked as the asker checks them; nothing of a
state is kept here, and whatever a donor says is told as its word.
(arXiv 2604.21428, App. E.)
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from ddiloco_jax.protocol import events
from ddiloco_jax.syncer import limits
from ddiloco_jax.wire import (
  fields,
  methods,
  options,
  port,
  tls,
  tokens,
  transfer,
)
from ddiloco_jax.wire import state as states
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError

_MAX_RELAYS = 4  # At once; each holds a thread of the server.
_TELL_S = 2.0  # In which an asker is told why; who reads nothing is cut off.


class Relay:
  """Streams states from donors to those that ask the syncer.

  Args:
    known: Tokens; a donor hears the one that it says itself.
    patience_s: A donor answers at its next boundary with the asked clock; from
      the call on it has so long, and what its bytes take at 1 MB/s.
  """

  def __init__(
    self,
    cfg: options.WireConfig,
    known: tokens.Tokens,
    patience_s: float = 90.0,
  ):
    self._cfg = cfg
    self._known = known
    self._patience_s = patience_s
    self._slots = limits.Slots(
      _MAX_RELAYS, "states on their way through the syncer", "fixed", 1, "fixed"
    )

  def introduce(self, notice: port.Notice) -> port.Notice:
    """What a learner is told; of a donor that has a token of its own no
    address: it takes no other, and should hear none of any id."""
    if not isinstance(notice, port.Welcomed) or notice.donor is None:
      return notice
    if not self._known.is_bound(notice.donor.learner):
      return notice
    return dataclasses.replace(notice, donor=notice.donor._replace(address=""))

  def end(self, asker: str) -> None:
    """Ends what a learner has asked for."""
    self._slots.end(asker)

  def stream(
    self, request: pb.FetchStateRequest, donor: events.Donor, context
  ) -> Iterator[transfer.Part]:
    """The donor's answer to a request whose session was checked.

    Raises:
      ServiceError: UNAVAILABLE, whatever is wrong with the donor;
        RESOURCE_EXHAUSTED where it, or the syncer, serves others.
    """
    with self._slots.one(request.learner_id, context.cancel):
      try:
        yield from self._pass(request, donor, context)
      except ServiceError as error:
        busy = error.code == "RESOURCE_EXHAUSTED"
        raise ServiceError(
          error.code if busy else "UNAVAILABLE",
          f"donor {donor.learner}: {fields.said_from_pb(error.text)}",
        ) from error

  def _pass(
    self, request: pb.FetchStateRequest, donor: events.Donor, context
  ) -> Iterator[transfer.Part]:
    forwarded = pb.FetchStateRequest(
      learner_id=request.learner_id,
      incarnation=request.incarnation,
      run_id=request.run_id,
      donor_id=donor.learner,
      clock=request.clock,
    )  # The session's secret goes no further.
    asked = states.Asked(
      clock=states.clock_from_pb(request, len(request.clock)),
      donor=donor.learner,
    )
    token = self._known.of_donor(donor.learner)
    with self._open(donor.address, token) as channel:
      call = methods.make_call(
        channel, "FetchState", methods.PEER, tokens.as_metadata(token)
      )(forwarded)
      if not context.add_callback(call.cancel):
        call.cancel()
      try:
        with _Limit(call, context.cancel, self._patience_s) as limit:
          header = transfer.receive_header(call)
          asked.read_clock(header)
          chunks = transfer.receive_chunks(call, header.num_bytes)
          yield from transfer.send(pb.StateChunk, header, limit.count(chunks))
      except grpc.RpcError as error:
        raise tls.fault(
          error, donor.address, self._cfg, "the syncer"
        ) from error
      finally:
        call.cancel()

  def _open(self, address: str, token: tokens.Token | None) -> grpc.Channel:
    try:
      credentials = tls.channel_credentials(self._cfg)
      return tls.open_channel(address, self._cfg, token, credentials)
    except ValueError as error:
      raise ServiceError("FAILED_PRECONDITION", str(error)) from error


class _Limit:
  """Ends a call that takes longer; each byte that has come puts the end off.

  Then also the asker's own call, if that takes nothing, not even the reason.
  What a header announces puts off nothing: the syncer cannot tell whether it
  is true.
  """

  def __init__(
    self, call: grpc.Call, end: Callable[[], object], patience_s: float
  ):
    self._call, self._end = call, end
    self._end_at = time.monotonic() + patience_s
    self._is_over = threading.Event()

  def __enter__(self) -> "_Limit":
    threading.Thread(
      target=self._watch, name="relay-limit", daemon=True
    ).start()
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._is_over.set()

  def count(self, chunks: Iterator[transfer.Chunk]) -> Iterator[transfer.Chunk]:
    for chunk in chunks:
      self._end_at += len(chunk) / transfer.SLOWEST_BYTES_PER_S
      yield chunk

  def _watch(self) -> None:
    while (left_s := self._end_at - time.monotonic()) > 0:
      if self._is_over.wait(left_s):
        return
    self._call.cancel()
    if not self._is_over.wait(_TELL_S):
      self._end()
