"""TLS of a server and of its callers, from PEM files; and why it failed.

gRPC says of a failed handshake no more than that it failed: `diagnose` tries it
once more with Python's own ssl, which knows the cause. (docs/security.md)
"""

import contextlib
import pathlib
import socket
import ssl

import grpc

from ddiloco_jax.wire import listening, options
from ddiloco_jax.wire.options import WireConfig
from ddiloco_jax.wire.tokens import Token

_PROBE_S = 2.0
_EXPIRED, _NOT_YET = 10, 9  # OpenSSL's X509_V_ERR numbers.
_OTHER_NAME = (62, 64)  # For a name, and for an IP address.


def server_credentials(cfg: WireConfig) -> grpc.ServerCredentials | None:
  """Of wire.tls_cert and wire.tls_key; None without them.

  Raises:
    ValueError: a file that is not there, or not what it should be.
  """
  if not cfg.tls_cert:
    return None
  key, cert = _read_own(cfg)
  root = None
  if cfg.require_client_cert:
    root = _read("wire.tls_ca", cfg.tls_ca)
    _context(cfg)  # gRPC would say that it could not bind.
  return grpc.ssl_server_credentials(
    [(key, cert)], root, cfg.require_client_cert
  )


def channel_credentials(cfg: WireConfig) -> grpc.ChannelCredentials | None:
  """Of wire.tls_ca, and of a certificate of its own if there is one.

  Returns:
    None without wire.tls_ca: plaintext.

  Raises:
    ValueError: a file that is not there, or not what it should be.
  """
  if not cfg.tls_ca:
    return None
  root = _read("wire.tls_ca", cfg.tls_ca)
  _context(cfg)
  key, cert = _read_own(cfg) if cfg.tls_cert else (None, None)
  return grpc.ssl_channel_credentials(root, key, cert)


def open_channel(
  address: str, cfg: WireConfig, token: Token | None
) -> grpc.Channel:
  """A connection with whoever serves at HOST:PORT.

  Raises:
    ValueError: a token would be said where others could read along, or a file
      is not what it should be.
  """
  check_may_send(address, cfg, token)
  settings = options.channel_options(cfg)
  if credentials := channel_credentials(cfg):
    return grpc.secure_channel(address, credentials, settings)
  return grpc.insecure_channel(address, settings)


def check_may_send(address: str, cfg: WireConfig, token: Token | None) -> None:
  """Refuses to say a token where others could read along.

  Raises:
    ValueError: beyond loopback without TLS.
  """
  host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
  if token and not cfg.tls_ca and not listening.is_loopback(host):
    raise ValueError(
      f"A token was to be sent to {address}, on another machine, without TLS:"
      " whoever reads along on the network would have it. Set wire.tls_ca to"
      " the CA of the syncer's certificate; wire.insecure does not allow it."
    )


def diagnose(address: str, cfg: WireConfig) -> str | None:
  """Why no connection with an address comes about, for a person to mend.

  Returns:
    None where TLS is not the cause, as far as can be seen from here.
  """
  host, _, port = address.rpartition(":")
  host = host.removeprefix("[").removesuffix("]")
  context = _context(cfg) if cfg.tls_ca else _trusting_context()
  try:
    with socket.create_connection((host, int(port)), _PROBE_S) as plain:
      family, peer = plain.family, plain.getpeername()
    # Wrapped, then connected: ssl does not close a connection that it takes
    # over and that is reset before its handshake.
    with context.wrap_socket(
      socket.socket(family), server_hostname=host
    ) as wrapped:
      wrapped.settimeout(_PROBE_S)
      wrapped.connect(peer)
      if not cfg.tls_ca:
        return (
          f"the service at {address} speaks TLS, and this process does not:"
          " set wire.tls_ca to the CA of its certificate."
        )
      return _own_certificate(wrapped, address, cfg)
  except ssl.SSLCertVerificationError as error:
    return _verification(error, address, host, cfg)
  except ssl.SSLEOFError:
    return None  # Cut off: it may have ended just now.
  except ssl.SSLError as error:
    return _handshake(error, address) if cfg.tls_ca else None
  except OSError:
    return None


def _own_certificate(
  wrapped: ssl.SSLSocket, address: str, cfg: WireConfig
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
      f"the service at {address} asks for a certificate"
      " (wire.require_client_cert), and this process has none: set"
      " wire.tls_cert and wire.tls_key."
    )
  return (
    f"the service at {address} does not take this process's certificate"
    f" wire.tls_cert={cfg.tls_cert}: use one that its CA has signed and that"
    " has not expired."
  )


def _verification(
  error: ssl.SSLCertVerificationError, address: str, host: str, cfg: WireConfig
) -> str:
  if error.verify_code in (_EXPIRED, _NOT_YET):
    word = "has expired" if error.verify_code == _EXPIRED else "begins later"
    return (
      f"the certificate of {address} {word}: give the syncer a new one"
      " (wire.tls_cert), or set this machine's clock right."
    )
  if error.verify_code in _OTHER_NAME:
    return (
      f"the certificate of {address} is not for host {host!r}: use a name that"
      " it has (subjectAltName), or make one that has this name."
    )
  return (
    f"the certificate of {address} is not signed by the CA of"
    f" wire.tls_ca={cfg.tls_ca} ({error.verify_message}): give the CA that"
    " signed the syncer's certificate."
  )


def _handshake(error: ssl.SSLError, address: str) -> str:
  reason = error.reason or str(error)
  if "WRONG_VERSION" in reason or "RECORD_LAYER" in reason:
    return (
      f"the service at {address} does not speak TLS, and wire.tls_ca asks for"
      " it: set wire.tls_cert and wire.tls_key at the syncer."
    )
  return f"no TLS with {address} comes about: {reason}."


def _context(cfg: WireConfig) -> ssl.SSLContext:
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  context.set_alpn_protocols(["h2"])
  try:
    context.load_verify_locations(cfg.tls_ca)
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


def _read_own(cfg: WireConfig) -> tuple[bytes, bytes]:
  """Key and certificate, of which it is known that they belong together."""
  key = _read("wire.tls_key", cfg.tls_key)
  cert = _read("wire.tls_cert", cfg.tls_cert)
  _load_own(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cfg)
  return key, cert


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


def _read(setting: str, path: str) -> bytes:
  with contextlib.suppress(OSError):
    return pathlib.Path(path).read_bytes()
  raise ValueError(
    f"{setting}={path} cannot be read. It must be a PEM file that this user"
    " may read."
  )
