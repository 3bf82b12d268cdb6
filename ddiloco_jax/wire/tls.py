"""TLS of a server and of its callers, from PEM files; and why it failed.

gRPC says of a failed handshake no more than that it failed: `diagnose` tries it
once more with Python's own ssl, which knows the cause. (docs/security.md)
"""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from concurrent import futures

import grpc

from ddiloco_jax.wire import listening, options, pem
from ddiloco_jax.wire.options import WireConfig
from ddiloco_jax.wire.status import ServiceError, from_grpc
from ddiloco_jax.wire.tokens import Token

_PROBE_S = 2.0
_EXPIRED, _NOT_YET = 10, 9  # OpenSSL's X509_V_ERR numbers.
_OTHER_NAME = (62, 64)  # For a name, and for an IP address.
# gRPC's codes of a handshake that failed; the second, of a name alone.
_OF_HANDSHAKES = (
  grpc.StatusCode.UNAVAILABLE,
  grpc.StatusCode.UNAUTHENTICATED,
)

# What gRPC says where somebody was there, and no connection came about.
_NO_CONNECTION = (
  "handshake",
  "Socket closed",
  "erification check failed",
  "reset by peer",
)


def server_credentials(cfg: WireConfig) -> grpc.ServerCredentials | None:
  """Of wire.tls_cert and wire.tls_key; None without them.

  Raises:
    ValueError: a file that is not there, or not what it should be.
  """
  if not cfg.tls_cert:
    return None
  key, cert = _read_own(cfg)
  root = _read_root(cfg) if cfg.require_client_cert else None
  return _server_credentials(cfg, key, cert, root)


def channel_credentials(cfg: WireConfig) -> grpc.ChannelCredentials | None:
  """Of wire.tls_ca, and of a certificate of its own if there is one.

  Returns:
    None without wire.tls_ca: plaintext.

  Raises:
    ValueError: a file that is not there, or not what it should be.
  """
  if not cfg.tls_ca:
    return None
  root = _read_root(cfg)
  if not cfg.tls_cert:
    return grpc.ssl_channel_credentials(root)
  key, cert = _read_own(cfg)
  _server_credentials(cfg, key, cert, root)  # As a check; see there.
  return grpc.ssl_channel_credentials(root, key, cert)


def open_channel(
  address: str,
  cfg: WireConfig,
  token: Token | None,
  credentials: grpc.ChannelCredentials | None,
) -> grpc.Channel:
  """A connection with whoever serves at HOST:PORT.

  Args:
    credentials: See `channel_credentials`.

  Raises:
    ValueError: a token would be said where others could read along.
  """
  check_may_send(address, cfg, token)
  settings = options.channel_options(cfg)
  if credentials:
    return grpc.secure_channel(address, credentials, settings)
  return grpc.insecure_channel(address, settings)


def check_may_send(address: str, cfg: WireConfig, token: Token | None) -> None:
  """Refuses to say a token where others could read along.

  Raises:
    ValueError: beyond loopback without TLS.
  """
  host, _ = _split(address)
  if token and not cfg.tls_ca and not listening.is_loopback(host):
    raise ValueError(
      f"A token was to be sent to {address}, on another machine, without TLS:"
      " whoever reads along on the network would have it. Set wire.tls_ca to"
      " the CA of the syncer's certificate; wire.insecure does not allow it."
    )


def fault(
  error: grpc.RpcError, address: str, cfg: WireConfig, who: str = "this process"
) -> ServiceError:
  """What a call to `address` failed with, and why, where that is TLS.

  Args:
    who: Called, with these settings.
  """
  assert isinstance(error, grpc.Call), error
  told = from_grpc(error, address)
  if error.code() in _OF_HANDSHAKES and (cause := diagnose(address, cfg, who)):
    return ServiceError(told.code, cause)
  return told


def may_be_why(text: str) -> bool:
  """Whether TLS may be why a call failed, by what gRPC says of it."""
  return any(words in text for words in _NO_CONNECTION)


def diagnose(
  address: str, cfg: WireConfig, who: str = "this process"
) -> str | None:
  """Why no connection with an address comes about, for a person to mend.

  Args:
    who: Called, with these settings.

  Returns:
    None where TLS is not the cause, as far as can be seen from here.
  """
  try:
    context = _context(cfg) if cfg.tls_ca else _trusting_context()
    with _shaking_hands(address, context) as connection:
      if not cfg.tls_ca:
        return (
          f"the service at {address} speaks TLS, and {who} does not: set its"
          " wire.tls_ca to the CA of that certificate."
        )
      return _own_certificate(connection, address, cfg, who)
  except ssl.SSLCertVerificationError as error:
    return _verification(error, address, cfg)
  except ssl.SSLEOFError:
    return None  # Cut off: it may have ended just now.
  except ssl.SSLError as error:
    return _handshake(error, address, who) if cfg.tls_ca else None
  except OSError:
    return None
  except ValueError:
    return None  # Of a file, which was another one when it was read for use.


@contextlib.contextmanager
def _shaking_hands(
  address: str, context: ssl.SSLContext
) -> Iterator[ssl.SSLSocket]:
  """A connection that stands, with TLS."""
  host, port = _split(address)
  with socket.create_connection((host, port), _PROBE_S) as plain:
    family, peer = plain.family, plain.getpeername()
  # Wrapped, then connected: ssl does not close a connection that it takes over
  # and that is reset before its handshake.
  with context.wrap_socket(
    socket.socket(family), server_hostname=host
  ) as wrapped:
    wrapped.settimeout(_PROBE_S)
    wrapped.connect(peer)
    yield wrapped


def _own_certificate(
  wrapped: ssl.SSLSocket, address: str, cfg: WireConfig, who: str
) -> str | None:
  """Whether a server, once TLS stands, turns away who has not its trust: gRPC
  then closes the connection before its first frame."""
  try:
    if wrapped.recv(1):
      return None
  except TimeoutError:
    return None
  except OSError:
    pass  # Reset, or an alert.
  if not cfg.tls_cert:
    return (
      f"the service at {address} asks for a certificate, and {who} has none:"
      " set its wire.tls_cert and wire.tls_key."
    )
  return (
    f"the service at {address} does not take {who}'s certificate"
    f" wire.tls_cert={cfg.tls_cert}: use one that its CA has signed and that"
    " has not expired."
  )


def _verification(
  error: ssl.SSLCertVerificationError, address: str, cfg: WireConfig
) -> str:
  if error.verify_code in (_EXPIRED, _NOT_YET):
    word = "has expired" if error.verify_code == _EXPIRED else "begins later"
    return (
      f"the certificate of {address} {word}: give the service there a new one"
      " (wire.tls_cert), or set this machine's clock right."
    )
  if error.verify_code in _OTHER_NAME:
    host, _ = _split(address)
    if _has_no_names(address, cfg):
      return (
        f"the certificate of {address} is for no host: it has no"
        " subjectAltName (SAN), and its CN does not count. Make one that has"
        f" {host!r} there, as scripts/make_certs.sh does."
      )
    return (
      f"the certificate of {address} is not for host {host!r}: use a name that"
      " it has (subjectAltName), or make one that has this name."
    )
  return (
    f"the certificate of {address} is not signed by the CA of"
    f" wire.tls_ca={cfg.tls_ca} ({error.verify_message}): give the CA that"
    " signed it."
  )


def _has_no_names(address: str, cfg: WireConfig) -> bool:
  try:
    context = _context(cfg)
  except ValueError:
    return False  # It is being written.
  context.check_hostname = False
  with (
    contextlib.suppress(OSError),
    _shaking_hands(address, context) as connection,
  ):
    return "subjectAltName" not in (connection.getpeercert() or {})
  return False


def _handshake(error: ssl.SSLError, address: str, who: str) -> str:
  reason = error.reason or str(error)
  if "WRONG_VERSION" in reason or "RECORD_LAYER" in reason:
    return (
      f"the service at {address} does not speak TLS, and {who} does"
      " (wire.tls_ca): set wire.tls_cert and wire.tls_key there."
    )
  return f"no TLS with {address} comes about: {reason}."


def _context(cfg: WireConfig) -> ssl.SSLContext:
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  context.set_alpn_protocols(["h2"])
  blocks = pem.read("wire.tls_ca", cfg.tls_ca, "CERTIFICATE")
  plain = b"".join(x.der for x in blocks if not x.label.startswith("TRUSTED"))
  try:
    context.load_verify_locations(cfg.tls_ca)
    if plain:  # Of which it may have passed over some, and gRPC will not.
      context.load_verify_locations(cadata=plain)
  except (OSError, ssl.SSLError) as error:
    raise ValueError(
      f"wire.tls_ca={cfg.tls_ca} is no certificate: {error}. It must be a PEM"
      " file."
    ) from None
  if cfg.tls_cert:
    _load_own(context, cfg)
  return context


def _trusting_context() -> ssl.SSLContext:
  """To find out whether somebody speaks TLS; nothing is said to them."""
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  context.set_alpn_protocols(["h2"])
  context.check_hostname = False
  context.verify_mode = ssl.CERT_NONE
  return context


def _server_credentials(
  cfg: WireConfig, key: bytes, cert: bytes, root: bytes | None
) -> grpc.ServerCredentials:
  """What gRPC can use: it looks only when it binds or connects, and says then
  that it cannot bind or connect.

  Raises:
    ValueError: it cannot use them.
  """
  credentials = grpc.ssl_server_credentials([(key, cert)], root, bool(root))
  probe = grpc.server(futures.ThreadPoolExecutor(1))
  try:
    probe.add_secure_port("127.0.0.1:0", credentials)
  except RuntimeError:
    ca = f" and wire.tls_ca={cfg.tls_ca}" if root else ""
    raise ValueError(
      f"gRPC cannot use wire.tls_cert={cfg.tls_cert},"
      f" wire.tls_key={cfg.tls_key}{ca}: it knows fewer kinds of keys than"
      " OpenSSL. Use an RSA or a P-256 key, as scripts/make_certs.sh does."
    ) from None
  finally:
    probe.stop(0.0)
  return credentials


def _read_root(cfg: WireConfig) -> bytes:
  _context(cfg)  # It can be used.
  return pem.write(pem.read("wire.tls_ca", cfg.tls_ca, "CERTIFICATE"))


def _read_own(cfg: WireConfig) -> tuple[bytes, bytes]:
  """Key and certificate, of which it is known that they belong together."""
  key = pem.read("wire.tls_key", cfg.tls_key, "PRIVATE KEY")
  cert = pem.read("wire.tls_cert", cfg.tls_cert, "CERTIFICATE")
  _load_own(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cfg)
  return pem.write(key), pem.write(cert)


def _load_own(context: ssl.SSLContext, cfg: WireConfig) -> None:
  try:
    # Asked for a password, it would wait for a terminal.
    context.load_cert_chain(cfg.tls_cert, cfg.tls_key, password=lambda: "")
  except (OSError, ssl.SSLError) as error:
    raise ValueError(
      f"wire.tls_cert={cfg.tls_cert} and wire.tls_key={cfg.tls_key} cannot be"
      f" used: {error}. They must be PEM files, a certificate (chain) and its"
      " key without a password."
    ) from None


def _split(address: str) -> tuple[str, int]:
  host, _, port = address.rpartition(":")
  return host.removeprefix("[").removesuffix("]"), int(port)
