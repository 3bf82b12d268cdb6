"""A learner's own port: to whom it gives a state, and what is told of a fault."""

import contextlib
import dataclasses
import threading

import grpc
import numpy as np
import pytest

from ddiloco_jax.learner import peer
from ddiloco_jax.learner.client import Client
from ddiloco_jax.protocol import events
from ddiloco_jax.syncer.relay import Relay
from ddiloco_jax.wire import listening, methods, tls, tokens
from ddiloco_jax.wire.options import WireConfig
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError
from tests.support.secured import LEARNER_TOKEN, certs, token_file

CLOCK = [events.Version(1, 3)]
REQUEST = pb.FetchStateRequest(
  learner_id="bob",
  run_id="run-1",
  donor_id="ada",
  clock=[pb.Version(epoch=1, n=3)],
)


@contextlib.contextmanager
def donor(cfg, address="127.0.0.1:0"):
  """Learner ada, who comes to boundaries; yields what peers are told."""
  served = peer.serve_state("ada", address, "127.0.0.1:1", cfg)
  assert served
  desk, server = served
  desk.open("run-1", len(CLOCK))
  over = threading.Event()

  def train():
    while not over.wait(0.01):
      desk.answer(5, CLOCK, lambda: {"m": np.ones(4, np.float32)})

  loop = threading.Thread(target=train)
  loop.start()
  try:
    yield server.address
  finally:
    over.set()
    loop.join()
    server.close()


def fetch(address, cfg, request=REQUEST, token=None):
  """The parts of a state, from whoever serves there."""
  credentials = tls.channel_credentials(cfg)
  with tls.open_channel(address, cfg, token, credentials) as channel:
    call = methods.make_call(
      channel, "FetchState", methods.PEER, tokens.as_metadata(token)
    )
    return list(call(request, timeout=20.0))


def test_under_mutual_tls_a_state_is_for_who_has_a_certificate():
  # As the README has it: a learner is given wire.tls_* and no more.
  cfg = WireConfig(**certs())
  stranger = Client("127.0.0.1:1", WireConfig(tls_ca=cfg.tls_ca), learner="bob")

  with donor(cfg) as address:
    parts = fetch(address, cfg)
    with pytest.raises(ServiceError, match="asks for a certificate"):
      list(stranger.open_state(REQUEST, address))
    stranger.close()

  assert parts[0].header.donor_id == "ada"


def test_where_tokens_guard_it_a_state_is_for_who_has_one():
  # A learner without a certificate serves no state, and may have one.
  cfg = WireConfig(**certs(), token_file=token_file(LEARNER_TOKEN))
  plain = WireConfig(tls_ca=cfg.tls_ca)

  with donor(cfg) as address:
    parts = fetch(address, plain, token=tokens.Token(LEARNER_TOKEN))
    with pytest.raises(grpc.RpcError, match="no token was sent"):
      fetch(address, plain)

  assert parts[0].header.donor_id == "ada"


def test_an_admins_token_guards_no_state():
  admins = token_file("the-token-of-an-admin-0123456789")
  cfg = WireConfig(**certs(), admin_token_file=admins)

  with donor(cfg) as address, pytest.raises(grpc.RpcError):
    fetch(address, WireConfig(tls_ca=cfg.tls_ca))


@pytest.mark.parametrize(
  ("run_id", "donor_id"), [("run-2", "ada"), ("run-1", "x"), ("", "")]
)
def test_a_wrong_guess_is_not_told_the_right_one(run_id, donor_id):
  asked = pb.FetchStateRequest(
    learner_id="bob", run_id=run_id, donor_id=donor_id
  )
  with donor(WireConfig()) as address, pytest.raises(grpc.RpcError) as caught:
    fetch(address, WireConfig(), asked)

  assert isinstance(caught.value, grpc.Call)
  said = caught.value.details() or ""
  assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
  assert ("run-1" in said) == (run_id == "run-1")
  assert ("ada" in said) == (donor_id == "ada")


def test_a_learner_that_has_not_joined_tells_nobody_who_it_is():
  with pytest.raises(ServiceError, match="has not joined") as caught:
    peer.Desk("ada").ask(REQUEST, threading.Event())

  assert "ada" not in caught.value.text


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_peers_of_a_wildcard_are_told_what_reaches_the_syncer(host):
  with donor(WireConfig(insecure=True), f"{host}:0") as address:
    assert listening.parse_address(address)[0] == "127.0.0.1"
    assert fetch(address, WireConfig())


def elsewhere():
  return WireConfig(**certs("elsewhere", hosts=("example.org",)))


FAULTS = {
  "another host's certificate": (elsewhere, "is not for host '127.0.0.1'"),
  "another CA": (
    lambda: WireConfig(**certs(ca="other")),
    "is not signed by the CA",
  ),
  "no TLS": (WireConfig, "does not speak TLS"),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_tls_that_fails_at_a_peer_is_told_with_its_cause(cause):
  of_donor, says = FAULTS[cause]
  client = Client("127.0.0.1:1", WireConfig(**certs()), learner="bob")

  with donor(of_donor()) as address:
    with pytest.raises(ServiceError, match=says):
      list(client.open_state(REQUEST, address))
    client.close()


def relayed(cfg, address):
  class Caller:
    def add_callback(self, callback):
      return True

    def cancel(self):
      return True

  relay = Relay(cfg, tokens.Tokens())
  return list(relay.stream(REQUEST, events.Donor("ada", address), Caller()))


@pytest.mark.parametrize("cause", FAULTS)
def test_tls_that_fails_at_the_relay_is_told_with_its_cause(cause):
  of_donor, says = FAULTS[cause]

  with (
    donor(of_donor()) as address,
    pytest.raises(ServiceError, match=f"donor ada: .*{says}") as caught,
  ):
    relayed(WireConfig(**certs()), address)

  assert caught.value.code == "UNAVAILABLE"


@pytest.mark.parametrize(
  ("lacks", "says"),
  [
    (("tls_ca",), "speaks TLS, and the syncer does not"),
    (("tls_cert", "tls_key"), "certificate, and the syncer has none"),
  ],
)
def test_what_the_syncer_lacks_for_a_relay_is_told_as_its_own(lacks, says):
  whole = WireConfig(**certs())
  of_syncer = dataclasses.replace(whole, **dict.fromkeys(lacks, ""))

  with donor(whole) as address:
    assert relayed(whole, address)
    with pytest.raises(ServiceError, match=f"donor ada: .*{says}"):
      relayed(of_syncer, address)
