"""The syncer's gRPC server: address, threads, health and reflection.

It carries any Synchronizer; the rules about who may listen where are here.
(arXiv 2604.21428, Sec. 3.)
"""

from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ddiloco_jax.syncer.errors import InUse
from ddiloco_jax.syncer.relay import Relay
from ddiloco_jax.syncer.service import Served, Service
from ddiloco_jax.wire import listening, methods, options, tls, tokens


class Server:
  """Has an address from its making on, and answers there once it serves.

  A run that is not made yet finds out first whether it could be reached; who
  connects too early waits.

  Args:
    address: HOST:PORT to listen on; port 0 takes a free one.

  Attributes:
    address: What learners are given, HOST:PORT.
    port: The port it listens on, the chosen one if 0 was asked for.

  Raises:
    InUse: the address cannot be listened on.
    ValueError: an address that is malformed, or beyond loopback without TLS.
  """

  def __init__(self, address: str, cfg: options.WireConfig):
    host, asked_port = listening.parse_address(address)
    known = tokens.read_tokens(cfg)
    listening.check_reach(host, "The syncer", cfg, has_tokens=bool(known))
    credentials = tls.server_credentials(cfg)
    self._cfg, self._known = cfg, known
    self._gate = tokens.Gate(known, is_local=listening.is_loopback(host))
    self._server = grpc.server(
      futures.ThreadPoolExecutor(cfg.max_calls, thread_name_prefix="call"),
      options=options.server_options(cfg),
      interceptors=[self._gate],
    )
    self._health = health.HealthServicer(
      experimental_non_blocking=True,
      experimental_thread_pool=futures.ThreadPoolExecutor(
        1, thread_name_prefix="health"
      ),
    )
    try:
      self.port = listening.bind(self._server, host, asked_port, credentials)
    except OSError as error:
      raise InUse(str(error)) from error
    self.address = listening.join(host, self.port)

  def serve(self, synchronizer: Served) -> None:
    """Starts to answer for the Syncer, or for anything that mirrors it."""
    server = self._server
    names = (methods.SERVICE.full_name, health.SERVICE_NAME)
    for name in ("", *names):
      self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
    reflection.enable_server_reflection(
      (*names, reflection.SERVICE_NAME), server
    )
    service = Service(
      synchronizer, self._cfg, self._gate, Relay(self._cfg, self._known)
    )
    server.add_generic_rpc_handlers((methods.make_handlers(service),))
    server.start()

  def stop(self, grace_s: float) -> None:
    """Refuses new calls, and ends those still open after grace_s."""
    self._health.enter_graceful_shutdown()
    self._server.stop(grace_s).wait()
