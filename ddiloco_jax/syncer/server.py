"""The syncer's gRPC server: address, threads, health and reflection.

It carries any Synchronizer; the rules about who may listen where are here.
(arXiv 2604.21428, Sec. 3.)
"""

from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ddiloco_jax.syncer.errors import InUse
from ddiloco_jax.syncer.relay import Relay
from ddiloco_jax.syncer.service import Served, Service
from ddiloco_jax.wire import listening, methods, opening, options, tls, tokens
from ddiloco_jax.wire.status import ServiceError, abort

_NAMES = (methods.SERVICE.full_name, health.SERVICE_NAME)


class Server:
  """Listens from its making on, and answers for a run once it serves one.

  A run that is not made yet finds out first whether it could be reached. Until
  then its health is NOT_SERVING, and every call of the run is answered with
  UNAVAILABLE, so that who calls tries again or elsewhere.

  Args:
    address: HOST:PORT to listen on; port 0 takes a free one.
    cfg: Of the wire.
    waits_for: A sentence for who calls too early; any thread may ask it.

  Attributes:
    address: What learners are given, HOST:PORT.
    port: The port it listens on, the chosen one if 0 was asked for.

  Raises:
    InUse: the address cannot be listened on.
    ValueError: an address that is malformed, or beyond loopback without TLS.
  """

  def __init__(
    self,
    address: str,
    cfg: options.WireConfig,
    waits_for: Callable[[], str] = lambda: "this syncer starts",
  ):
    host, asked_port = listening.parse_address(address)
    known = tokens.read_tokens(cfg)
    listening.check_reach(host, "The syncer", cfg, has_tokens=bool(known))
    credentials = tls.server_credentials(cfg)
    self._cfg, self._known = cfg, known
    self._gate = tokens.Gate(known, is_local=listening.is_loopback(host))
    self._server = grpc.server(
      futures.ThreadPoolExecutor(cfg.max_calls, thread_name_prefix="call"),
      options=options.server_options(cfg),
      interceptors=[
        self._gate,
        opening.Opening(
          cfg.call_timeout_s,
          cfg.max_calls // 2,
          methods.SERVICE.file.package,
          cfg.max_watchers,
        ),
      ],
    )
    self._health = _Health(experimental_non_blocking=False)
    try:
      self.port = listening.bind(self._server, host, asked_port, credentials)
    except OSError as error:
      raise InUse(str(error)) from error
    self.address = listening.join(host, self.port)
    self._run = _Run(waits_for)
    self._start()

  def serve(self, synchronizer: Served) -> None:
    """Starts to answer for the Syncer, or for anything that mirrors it."""
    service = Service(
      synchronizer, self._cfg, self._gate, Relay(self._cfg, self._known)
    )
    self._run.handlers = methods.make_handlers(service)
    self._say(health_pb2.HealthCheckResponse.SERVING)

  def stop(self, grace_s: float) -> None:
    """Refuses new calls, and ends those still open after grace_s."""
    self.shut(grace_s).wait()

  def shut(self, grace_s: float) -> Any:
    """As `stop`, without waiting for the calls that still run: an event."""
    self._health.enter_graceful_shutdown()
    return self._server.stop(grace_s)

  def _start(self) -> None:
    server = self._server
    self._say(health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
    reflection.enable_server_reflection(
      (*_NAMES, reflection.SERVICE_NAME), server
    )
    server.add_generic_rpc_handlers((self._run,))
    server.start()

  def _say(self, status: Any) -> None:
    for name in ("", *_NAMES):
      self._health.set(name, status)


class _Health(health.HealthServicer):
  """Keeps no name that a caller made up."""

  def Watch(self, request, context, send_response_callback=None):
    if request.service in ("", *_NAMES):
      return super().Watch(request, context, send_response_callback)
    unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    return iter([health_pb2.HealthCheckResponse(status=unknown)])


class _Run(grpc.GenericRpcHandler):
  """Calls of a run: refused as long as there is none.

  Attributes:
    handlers: Of the run.
  """

  def __init__(self, waits_for: Callable[[], str]):
    self._waits_for = waits_for
    self.handlers: grpc.GenericRpcHandler | None = None

  def service(self, handler_call_details: Any) -> Any:
    if self.handlers is not None:
      return self.handlers.service(handler_call_details)
    if not handler_call_details.method.startswith(f"/{_NAMES[0]}/"):
      return None
    # Of any kind of call: it takes nothing in, and gives nothing out.
    return grpc.stream_stream_rpc_method_handler(self._refuse)

  def _refuse(self, requests: Any, context: grpc.ServicerContext) -> Any:
    text = f"{self._waits_for()}. Try again, or the next address."
    abort(context, ServiceError("UNAVAILABLE", text))
