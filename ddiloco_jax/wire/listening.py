"""Where a server listens: addresses, and who may be reached from elsewhere.

The syncer's server and a learner's have the same rules.
(arXiv 2604.21428, Sec. 3.)
"""

import contextlib
import ipaddress
import socket

import grpc

from ddiloco_jax.wire.options import WireConfig


def check_reach(
  host: str, who: str, cfg: WireConfig, *, has_tokens: bool
) -> None:
  """Refuses a plaintext address that other machines can reach.

  Args:
    who: Begins the sentence.
    has_tokens: Callers would say tokens there.

  Raises:
    ValueError: the host is beyond loopback, without TLS.
  """
  if cfg.tls_cert or is_loopback(host):
    return
  if has_tokens:
    raise ValueError(
      f"{who} was to listen on {host} and to ask for tokens, without TLS:"
      " whoever reads along on the network would have them. Set wire.tls_cert"
      " and wire.tls_key, or listen on 127.0.0.1; wire.insecure does not allow"
      " it."
    )
  if not cfg.insecure:
    raise ValueError(
      f"{who} was to listen on {host}, which other machines can"
      " reach, without TLS: whoever reaches it could join the run. Set"
      " wire.tls_cert and wire.tls_key, listen on 127.0.0.1, or set"
      " wire.insecure on a network that you trust."
    )


def join(host: str, port: int) -> str:
  """HOST:PORT, as a caller writes it."""
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
  """Host and port of HOST:PORT.

  Raises:
    ValueError: it is malformed.
  """
  host, colon, digits = address.rpartition(":")
  host = host.removeprefix("[").removesuffix("]")
  if not (colon and host and digits.isdecimal() and int(digits) < 65536):
    raise ValueError(
      f"Address {address!r}: it must be HOST:PORT, such as"
      " 127.0.0.1:8470, with a port in 0..65535."
    )
  # Both families of the name could be two different processes' ports.
  return "127.0.0.1" if host == "localhost" else host, int(digits)


def is_loopback(host: str) -> bool:
  """Whether only this machine reaches it."""
  if host == "localhost":
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False  # A name: wherever it leads.


def is_wildcard(host: str) -> bool:
  """Whether it stands for every address of a machine, and so reaches none."""
  with contextlib.suppress(OSError):
    return socket.inet_aton(host) == bytes(4)  # "0" is one, too.
  try:
    address = ipaddress.IPv6Address(host)
  except ValueError:
    return False
  return (address.ipv4_mapped or address).is_unspecified


def dialled(address: str) -> str:
  """Where this machine reaches who listens at HOST:PORT."""
  host, _, port = address.rpartition(":")
  host = host.removeprefix("[").removesuffix("]")
  return f"127.0.0.1:{port}" if is_wildcard(host) else address


def bind(
  server: grpc.Server,
  host: str,
  port: int,
  credentials: grpc.ServerCredentials | None,
) -> int:
  """Makes a server listen, and returns the port that it has.

  Raises:
    OSError: it cannot.
  """
  shown = join(host, port)
  try:
    if credentials:
      return server.add_secure_port(shown, credentials)
    return server.add_insecure_port(shown)
  except RuntimeError as error:
    raise OSError(
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
