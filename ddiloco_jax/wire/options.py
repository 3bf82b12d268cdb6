"""Settings of the wire, and the gRPC options that both of its ends draw from.

Keepalive of client and server come from one value, so that the two never
disagree; no user ever sets a message limit. (arXiv 2604.21428, Sec. 3.)
"""

import dataclasses

FORMATS = ("float32", "bfloat16")  # Served; int8 and int4 have their place.
MAX_MESSAGE_BYTES = 4 << 20  # gRPC's own default limit of a receiver.
MAX_CHUNK_BYTES = 3 << 20  # Leaves room for whatever else is in a message.
MAX_STREAMS = 128
MAX_S = 1e6  # gRPC counts milliseconds in 32 bits.
MAX_METADATA_BYTES = 8 << 10  # A token, and what gRPC and proxies add.

Options = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
  """How bytes travel.

  Attributes:
    up_format: Format of replies; the syncer's value rules.
    down_format: Format of publications, the exact ones apart.
    chunk_bytes: The most data bytes in one message.
    keepalive_s: A silent connection is probed after so long.
    keepalive_timeout_s: It is dropped if a probe is not answered in so long. A
      probe waits behind what the link still holds: 14 MiB, at 1 MB/s.
    reconnect_max_s: The longest pause between two attempts to connect.
    call_timeout_s: Bound of a call that moves no fragment, and of the wait for
      the first message of any other.
    bandwidth_bytes_per_s: Cap on the fragment bytes that a learner sends, and
      likewise on those it receives; 0 for none.
    max_calls: Calls that the syncer serves at once: at least 2 per learner
      that it admits, and 8. A learner holds one, and one more per transfer;
      threads are made only as they are needed.
    max_transfers_per_learner: Pushes and fetches of one learner at once; of all
      of them, half of max_calls.
    max_watchers: Status streams that the syncer serves at once.
    joins_per_s: Joins that the syncer takes in the long run, and ten seconds'
      worth of them at once.
    progress_timeout_s: A push of which less came in so long than 1 kB/s brings
      is given up; so is one of which nothing came.
    insecure: Allow the syncer to listen beyond loopback without TLS; where
      there are tokens, nothing allows it.
    tls_cert: PEM file of this process's certificate, with what leads to its CA.
    tls_key: PEM file of its key.
    tls_ca: PEM file of the CA whose certificates this process trusts; a caller
      that has one speaks TLS.
    require_client_cert: Serve only whoever has a certificate of tls_ca.
    token_file: Learners' tokens, a line each: TOKEN, or LEARNER_ID TOKEN for
      one that is good for this id only; else $DDILOCO_TOKENS is read.
    admin_token_file: Admins' tokens, one a line; else $DDILOCO_ADMIN_TOKENS.
  """

  up_format: str = "bfloat16"
  down_format: str = "float32"
  chunk_bytes: int = 1 << 20
  keepalive_s: float = 10.0
  keepalive_timeout_s: float = 30.0
  reconnect_max_s: float = 1.0
  call_timeout_s: float = 10.0
  bandwidth_bytes_per_s: int = 0
  max_calls: int = 512
  max_transfers_per_learner: int = 8
  max_watchers: int = 16
  joins_per_s: float = 20.0
  progress_timeout_s: float = 60.0
  insecure: bool = False
  tls_cert: str = ""
  tls_key: str = ""
  tls_ca: str = ""
  require_client_cert: bool = False
  token_file: str = ""
  admin_token_file: str = ""

  def __post_init__(self):
    for name in ("up_format", "down_format"):
      if getattr(self, name) not in FORMATS:
        raise ValueError(
          f"wire.{name} is {getattr(self, name)!r}; it must be one of "
          f"{', '.join(FORMATS)}."
        )
    if not 1 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
      raise ValueError(
        f"wire.chunk_bytes is {self.chunk_bytes}; it must be in 1.."
        f"{MAX_CHUNK_BYTES}, so that no message reaches gRPC's default limit "
        f"of {MAX_MESSAGE_BYTES} bytes."
      )
    for name in (
      "keepalive_s",
      "keepalive_timeout_s",
      "reconnect_max_s",
      "call_timeout_s",
      "progress_timeout_s",
    ):
      if not 0.1 <= getattr(self, name) <= MAX_S:
        raise ValueError(
          f"wire.{name} is {getattr(self, name)}; it must be in 0.1.."
          f"{MAX_S:.0f} s."
        )
    if self.bandwidth_bytes_per_s < 0:
      raise ValueError(
        f"wire.bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}; it must "
        "be at least 0 (no cap)."
      )
    for name, least in (
      ("max_calls", 4),
      ("max_transfers_per_learner", 1),
      ("max_watchers", 0),
      ("joins_per_s", 0.1),
    ):
      if not getattr(self, name) >= least:
        raise ValueError(
          f"wire.{name} is {getattr(self, name)}; it must be at least {least}."
        )
    if bool(self.tls_cert) != bool(self.tls_key):
      raise ValueError(
        f"wire.tls_cert is {self.tls_cert!r} and wire.tls_key"
        f" {self.tls_key!r}; a certificate and its key go together."
      )
    if self.require_client_cert and not (self.tls_cert and self.tls_ca):
      raise ValueError(
        "wire.require_client_cert is True; it needs wire.tls_cert and"
        " wire.tls_key, and in wire.tls_ca the CA of the clients."
      )


def channel_options(cfg: WireConfig) -> Options:
  """Options of a learner's channel."""
  reconnect_ms = _ms(cfg.reconnect_max_s)
  return (
    *_shared_options(cfg),
    ("grpc.initial_reconnect_backoff_ms", min(100, reconnect_ms)),
    ("grpc.max_reconnect_backoff_ms", reconnect_ms),
    # Against its name, the time that one attempt to connect is given.
    ("grpc.min_reconnect_backoff_ms", 2 * reconnect_ms),
    # A name is resolved anew as often as it is tried.
    ("grpc.dns_min_time_between_resolutions_ms", reconnect_ms),
    # A connection, and its back-off, of its own for every channel.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # The environment changes nothing.
    ("grpc.enable_retries", 0),  # A link retries, and knows what it repeats.
  )


def server_options(cfg: WireConfig) -> Options:
  """Options of the syncer's server."""
  return (
    *_shared_options(cfg),
    # Nobody is thrown off for pinging too often, whatever its own settings.
    ("grpc.http2.max_ping_strikes", 0),
    (
      "grpc.http2.min_ping_interval_without_data_ms",
      _ms(min(1.0, cfg.keepalive_s / 2)),
    ),
    ("grpc.so_reuseport", 0),  # A port in use is an error.
    # Who connects and says nothing is thrown off.
    ("grpc.server_handshake_timeout_ms", _ms(cfg.call_timeout_s)),
    ("grpc.max_concurrent_streams", MAX_STREAMS),  # Of one connection.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
  )


def _shared_options(cfg: WireConfig) -> Options:
  return (
    ("grpc.keepalive_time_ms", _ms(cfg.keepalive_s)),
    ("grpc.keepalive_timeout_ms", _ms(cfg.keepalive_timeout_s)),
    # The one above is not enough: a ping is given a minute if this is not said.
    ("grpc.http2.ping_timeout_ms", _ms(cfg.keepalive_timeout_s)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # No limit.
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
  )


def _ms(seconds: float) -> int:
  return max(1, round(1000 * seconds))
