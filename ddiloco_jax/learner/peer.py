"""A learner's own service: its state, for a peer that comes back.

The training loop alone touches its state: a request waits at a desk until the
loop comes by, at a step boundary, and leaves a copy there. One request at a
time, so that the donor holds one copy more at most. (arXiv 2604.21428, App. E.)
"""

import contextlib
import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import grpc

from ddiloco_jax.protocol import events
from ddiloco_jax.wire import (
  fields,
  listening,
  methods,
  opening,
  options,
  tls,
  tokens,
  transfer,
)
from ddiloco_jax.wire import state as states
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError, abort

_log = logging.getLogger(__name__)
OFF = "off"
_WAIT_S = 60.0  # The longest wait for a boundary that has the clock.
_NUM_CALLS = 4


class Desk:
  """Where peers ask and the loop answers.

  Args:
    learner: Whose state it is.
  """

  def __init__(self, learner: str):
    self._learner = learner
    self._run_id = ""
    self._num_fragments = 0
    self._changed = threading.Condition()
    self._is_taken = False
    self._asked: Sequence[events.Version] | None = None
    self._state: states.State | None = None

  def open(self, run_id: str, num_fragments: int) -> None:
    """From now on the loop comes by."""
    self._run_id, self._num_fragments = run_id, num_fragments

  def answer(
    self,
    step: int,
    clock: Sequence[events.Version],
    take: Callable[[], Mapping[str, Any]],
  ) -> None:
    """The loop comes by, at a boundary; quick if nobody waits.

    Args:
      clock: What it trains from, per fragment.
      take: Copies the state.
    """
    with self._changed:
      asked = self._asked
      if asked is None or self._state is not None:
        return
      if any(
        have.n < wanted.n for have, wanted in zip(clock, asked, strict=True)
      ):
        return
    state = states.State(
      donor=self._learner, step=step, clock=tuple(clock), arrays=take()
    )
    with self._changed:
      if self._asked is asked:
        self._state = state
        self._changed.notify_all()

  def ask(
    self, request: pb.FetchStateRequest, is_gone: threading.Event
  ) -> states.State:
    """A copy whose clock is at least the request's; then `release`.

    Raises:
      ServiceError: RESOURCE_EXHAUSTED while another one is served, UNAVAILABLE
        where no boundary has had the clock in time, FAILED_PRECONDITION for
        another run or learner, INVALID_ARGUMENT for what is malformed.
    """
    self._check(request)
    clock = states.clock_from_pb(request, self._num_fragments)
    with self._changed:
      if self._is_taken:
        raise ServiceError(
          "RESOURCE_EXHAUSTED",
          f"learner {self._learner} gives its state to another learner, and to"
          " one at a time. Ask again.",
        )
      self._is_taken, self._asked, self._state = True, clock, None
      self._changed.wait_for(
        lambda: self._state is not None or is_gone.is_set(), _WAIT_S
      )
      if self._state is None:
        self._release()
        raise ServiceError(
          "UNAVAILABLE",
          f"learner {self._learner} came to no boundary with the asked clock."
          " Ask another learner.",
        )
      return self._state

  def release(self) -> None:
    """The copy was sent, or is not wanted any more."""
    with self._changed:
      self._release()

  def wake(self) -> None:
    """Somebody who asked is gone."""
    with self._changed:
      self._changed.notify_all()

  def _release(self) -> None:
    self._is_taken, self._asked, self._state = False, None, None

  def _check(self, request: pb.FetchStateRequest) -> None:
    if not self._run_id:
      raise ServiceError(
        "UNAVAILABLE", "this learner has not joined. Ask again."
      )
    if (request.run_id, request.donor_id) != (self._run_id, self._learner):
      raise ServiceError(
        "FAILED_PRECONDITION",
        f"learner {fields.said_from_pb(request.donor_id)!r} of run"
        f" {fields.said_from_pb(request.run_id)!r} was asked, and this is"
        " another one, or of another run. Ask the syncer who serves now.",
      )


class PeerServer:
  """Serves a desk over gRPC, once it is made.

  Whoever asks shows a token, where this learner knows any, or else, where it
  has a CA, a certificate of it.

  Args:
    address: HOST:PORT; port 0 takes a free one.
    told_host: What peers are told instead of HOST.

  Attributes:
    address: What peers are told, HOST:PORT.

  Raises:
    OSError: the address cannot be listened on.
    ValueError: it is malformed, or beyond loopback without TLS.
  """

  def __init__(
    self,
    address: str,
    desk: Desk,
    cfg: options.WireConfig,
    told_host: str = "",
  ):
    host, port = listening.parse_address(address)
    known = tokens.read_tokens(cfg)
    listening.check_reach(
      host, "A learner's state", cfg, has_tokens=bool(known)
    )
    if cfg.tls_ca and not cfg.tls_cert:
      raise ValueError(
        "A learner that speaks TLS was to serve its state, and has no"
        " certificate: set wire.tls_cert and wire.tls_key."
      )
    self._server = grpc.server(
      futures.ThreadPoolExecutor(_NUM_CALLS, thread_name_prefix="peer"),
      options=options.server_options(cfg),
      interceptors=[
        tokens.Gate(known, is_local=listening.is_loopback(host)),
        opening.Opening(
          cfg.call_timeout_s, _NUM_CALLS // 2, methods.PEER.file.package
        ),
      ],
      maximum_concurrent_rpcs=_NUM_CALLS,
    )
    if cfg.tls_ca and not known.learners:
      cfg = dataclasses.replace(cfg, require_client_cert=True)
    bound = listening.bind(
      self._server, host, port, tls.server_credentials(cfg)
    )
    self.address = listening.join(told_host or host, bound)
    handlers = methods.make_handlers(_Peer(desk, cfg), methods.PEER)
    self._server.add_generic_rpc_handlers((handlers,))
    self._server.start()

  def close(self) -> None:
    self._server.stop(0.0)


class _Peer:
  """The methods of ddiloco.v1.Peer."""

  def __init__(self, desk: Desk, cfg: options.WireConfig):
    self._desk = desk
    self._chunk_bytes = cfg.chunk_bytes

  def FetchState(
    self, request: pb.FetchStateRequest, context: grpc.ServicerContext
  ) -> Iterator[transfer.Part]:
    gone = threading.Event()

    def leave() -> None:
      gone.set()
      self._desk.wake()

    if not context.add_callback(leave):
      return  # It has gone already.
    try:
      asker = fields.learner_from_pb(
        "FetchStateRequest.learner_id", request.learner_id
      )
      state = self._desk.ask(request, gone)
    except ServiceError as error:
      abort(context, error)
    with contextlib.ExitStack() as stack:
      stack.callback(self._desk.release)
      _log.info("gives its state to learner %s", asker)
      num_bytes = sum(x.nbytes for x in state.arrays.values())
      limit_s = _WAIT_S + num_bytes / transfer.SLOWEST_BYTES_PER_S
      limit = threading.Timer(limit_s, context.cancel)
      limit.daemon = True
      limit.start()
      stack.callback(limit.cancel)
      yield from states.parts(state, self._chunk_bytes)


def serve_state(
  learner: str, address: str, syncer: str, cfg: options.WireConfig
) -> tuple[Desk, PeerServer] | None:
  """A desk and its server; None where this learner is not to serve.

  Args:
    address: HOST:PORT; "": a free port of the address that reaches the syncer,
      if it may listen there; "off": nowhere. Peers of a wildcard HOST are told
      the address that reaches the syncer.
    syncer: HOST:PORT of the syncer.

  Raises:
    OSError: the address cannot be listened on.
    ValueError: it is malformed, or beyond loopback without TLS.
  """
  if address == OFF:
    return None
  desk = Desk(learner)
  if address:
    asked, _ = listening.parse_address(address)
    told = _host_towards(syncer) if listening.is_wildcard(asked) else ""
    return desk, PeerServer(address, desk, cfg, told)
  host = _host_towards(syncer)
  try:
    return desk, PeerServer(listening.join(host, 0), desk, cfg)
  except (OSError, ValueError) as error:
    _log.info("learner %s serves no state to peers: %s", learner, error)
    return None


def _host_towards(syncer: str) -> str:
  """The own address from which a syncer is reached; nothing is sent."""
  host, port = listening.parse_address(syncer)
  try:
    family, kind, _, _, where = socket.getaddrinfo(
      host, port or 1, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
      probe.connect(where)
      return probe.getsockname()[0]
  except OSError:
    return "127.0.0.1"
