"""A peer's state by way of the syncer, for who cannot reach the peer itself.

Parts pass through as they come, checked as the asker checks them; nothing of a
state is kept here, and whatever a donor says is told as its word.
(arXiv 2604.21428, App. E.)
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

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
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError

_MAX_RELAYS = 4  # At once; each holds a thread of the server.
_HEADER_S = 90.0  # A donor answers at its next boundary with the asked clock.


class Relay:
  """Streams states from donors to those that ask the syncer.

  Args:
    known: Tokens; a donor hears the one that it says itself.
  """

  def __init__(self, cfg: options.WireConfig, known: tokens.Tokens):
    self._cfg = cfg
    self._known = known
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

  def stream(
    self, request: pb.FetchStateRequest, donor: events.Donor, context
  ) -> Iterator[transfer.Part]:
    """The donor's answer to a request whose session was checked.

    Raises:
      ServiceError: UNAVAILABLE, whatever is wrong with the donor;
        RESOURCE_EXHAUSTED where it, or the syncer, serves others.
    """
    with self._slots.one(request.learner_id):
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
    token = self._known.of_donor(donor.learner)
    with self._open(donor.address, token) as channel:
      call = methods.make_call(
        channel, "FetchState", methods.PEER, tokens.as_metadata(token)
      )(forwarded)
      if not context.add_callback(call.cancel):
        call.cancel()
      try:
        with _ending(call, _HEADER_S):
          header = transfer.receive_header(call)
        longest_s = header.num_bytes / transfer.SLOWEST_BYTES_PER_S
        with _ending(call, _HEADER_S + longest_s):
          chunks = transfer.receive_chunks(call, header.num_bytes)
          yield from transfer.send(pb.StateChunk, header, chunks)
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


@contextlib.contextmanager
def _ending(call: grpc.Call, after_s: float) -> Iterator[None]:
  """Ends a call that takes longer."""
  limit = threading.Timer(after_s, call.cancel)
  limit.daemon = True
  limit.start()
  try:
    yield
  finally:
    limit.cancel()
