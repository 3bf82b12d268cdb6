"""The syncer's gRPC server: address, threads, health and reflection.

It carries any Synchronizer; the rules about who may listen where are here.
(arXiv 2604.21428, Sec. 3.)
"""

import ipaddress
import socket
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ddiloco_jax.syncer.errors import InUse
from ddiloco_jax.syncer.service import Served, Service
from ddiloco_jax.wire import methods, options


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
    host, asked_port = _parse_address(address)
    if not _is_loopback(host) and not cfg.insecure:
      raise ValueError(
        f"The syncer was to listen on {address}, which other machines can"
        " reach, without TLS: whoever reaches it could join the run. Listen on"
        " 127.0.0.1, or set wire.insecure on a network that you trust."
      )
    self._cfg = cfg
    self._server = grpc.server(
      futures.ThreadPoolExecutor(cfg.max_calls, thread_name_prefix="call"),
      options=options.server_options(cfg),
    )
    self._health = health.HealthServicer(
      experimental_non_blocking=True,
      experimental_thread_pool=futures.ThreadPoolExecutor(
        1, thread_name_prefix="health"
      ),
    )
    self.port = _bind(self._server, host, asked_port)
    shown = f"[{host}]" if ":" in host else host
    self.address = f"{shown}:{self.port}"

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
    service = Service(synchronizer, self._cfg.call_timeout_s)
    server.add_generic_rpc_handlers((methods.make_handlers(service),))
    server.start()

  def stop(self, grace_s: float) -> None:
    """Refuses new calls, and ends those still open after grace_s."""
    self._health.enter_graceful_shutdown()
    self._server.stop(grace_s).wait()


def _parse_address(address: str) -> tuple[str, int]:
  host, colon, digits = address.rpartition(":")
  host = host.removeprefix("[").removesuffix("]")
  if not (colon and host and digits.isdecimal() and int(digits) < 65536):
    raise ValueError(
      f"Address {address!r} to listen on: it must be HOST:PORT, such as"
      " 127.0.0.1:8470, with a port in 0..65535."
    )
  # Both families of the name could be two different processes' ports.
  return "127.0.0.1" if host == "localhost" else host, int(digits)


def _is_loopback(host: str) -> bool:
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False  # A name: wherever it leads.


def _bind(server: grpc.Server, host: str, port: int) -> int:
  shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
  try:
    return server.add_insecure_port(shown)
  except RuntimeError as error:
    raise InUse(
      f"Cannot listen on {shown}: {_why_not(host, port)}. Stop the process"
      " that has the port, or choose another address."
    ) from error


def _why_not(host: str, port: int) -> str:
  """What the system says of the address, which gRPC does not pass on."""
  try:
    family, kind, _, _, where = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM
    )[0]
    with socket.socket(family, kind) as probe:
      probe.bind(where)
  except OSError as error:
    return error.strerror or str(error)
  return "gRPC could not bind it"
