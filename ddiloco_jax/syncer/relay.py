"""A peer's state by way of the syncer, for who cannot reach the peer itself.

Parts pass through as they come; nothing of a state is kept here.
(arXiv 2604.21428, App. E.)
"""

import threading
from collections.abc import Iterator

import grpc

from ddiloco_jax.protocol import events
from ddiloco_jax.wire import methods, options, tls, tokens, transfer
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError, from_grpc

_MAX_RELAYS = 4  # At once; each holds a thread of the server.


class Relay:
  """Streams states from donors to those that ask the syncer.

  Args:
    known: Tokens; a donor takes those that it has.
  """

  def __init__(self, cfg: options.WireConfig, known: tokens.Tokens):
    self._cfg = cfg
    self._known = known
    self._free = threading.BoundedSemaphore(_MAX_RELAYS)

  def stream(
    self, request: pb.FetchStateRequest, donor: events.Donor, context
  ) -> Iterator[transfer.Part]:
    """The donor's answer to a request whose session was checked.

    Raises:
      ServiceError: the donor's own, or that it cannot be reached.
    """
    if not self._free.acquire(blocking=False):
      raise ServiceError(
        "RESOURCE_EXHAUSTED",
        f"{_MAX_RELAYS} states pass through the syncer already. Ask again.",
      )
    try:
      yield from self._pass(request, donor, context)
    finally:
      self._free.release()

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
    token = self._known.of_peer(donor.learner)
    with self._open(donor.address, token) as channel:
      call = methods.make_call(
        channel, "FetchState", methods.PEER, tokens.as_metadata(token)
      )(forwarded)
      if not context.add_callback(call.cancel):
        call.cancel()
      try:
        yield from call
      except grpc.RpcError as error:
        raise from_grpc(error, donor.address) from error
      finally:
        call.cancel()

  def _open(self, address: str, token: tokens.Token | None) -> grpc.Channel:
    try:
      return tls.open_channel(address, self._cfg, token)
    except ValueError as error:
      raise ServiceError("FAILED_PRECONDITION", str(error)) from error
