"""The syncer's gRPC server: address, threads, health and reflection.

It carries any Synchronizer; the rules about who may listen where are here.
(arXiv 2604.21428, Sec. 3.)
"""

import dataclasses
import ipaddress
import socket
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ddiloco_jax.syncer.errors import InUse
from ddiloco_jax.syncer.service import Served, Service
from ddiloco_jax.wire import messages, methods, options


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
  """A running server.

  Attributes:
    address: What learners are given, HOST:PORT.
    port: The port it listens on, the chosen one if 0 was asked for.
  """

  address: str
  port: int
  _server: grpc.Server
  _health: health.HealthServicer

  def stop(self, grace_s: float) -> None:
    """Refuses new calls, and ends those still open after grace_s."""
    self._health.enter_graceful_shutdown()
    self._server.stop(grace_s).wait()


def serve(
  synchronizer: Served, address: str, cfg: options.WireConfig
) -> Server:
  """Starts to serve.

  Args:
    synchronizer: The Syncer, or anything that mirrors it.
    address: HOST:PORT to listen on; port 0 takes a free one.

  Raises:
    InUse: the address cannot be listened on.
    ValueError: an address that is malformed, or beyond loopback without TLS; a
      run whose description fits into no message.
  """
  host, asked_port = _parse_address(address)
  if not _is_loopback(host) and not cfg.insecure:
    raise ValueError(
      f"The syncer was to listen on {address}, which other machines can reach,"
      " without TLS: whoever reaches it could join the run. Listen on"
      " 127.0.0.1, or set wire.insecure on a network that you trust."
    )
  messages.run_to_pb(synchronizer.get_run())  # Fails now, not at a learner.
  server = grpc.server(
    futures.ThreadPoolExecutor(cfg.max_calls, thread_name_prefix="call"),
    options=options.server_options(cfg),
  )
  servicer = health.HealthServicer(
    experimental_non_blocking=True,
    experimental_thread_pool=futures.ThreadPoolExecutor(
      1, thread_name_prefix="health"
    ),
  )
  names = (methods.SERVICE.full_name, health.SERVICE_NAME)
  for name in ("", *names):
    servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
  health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
  reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
  server.add_generic_rpc_handlers(
    (methods.make_handlers(Service(synchronizer)),)
  )
  bound_port = _bind(server, host, asked_port)
  server.start()
  shown = f"[{host}]" if ":" in host else host
  return Server(f"{shown}:{bound_port}", bound_port, server, servicer)


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
