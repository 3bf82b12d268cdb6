"""Whatever a donor says, the syncer tells it as the donor's word."""

import contextlib
import logging
import threading
import time
import zlib
from concurrent import futures

import grpc
import pytest

from ddiloco_jax.learner.client import Client
from ddiloco_jax.protocol import events
from ddiloco_jax.syncer.relay import Relay
from ddiloco_jax.wire import tokens, transfer
from ddiloco_jax.wire.options import WireConfig
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError
from tests.support.secured import LEARNER_TOKEN, token_file

OWN_TOKEN = "a-token-of-ada-alone-0123456789"


class Caller:
  """What a relay asks of a call's context."""

  def __init__(self):
    self.cancelled = threading.Event()
    self.cancel = self.cancelled.set

  def add_callback(self, callback):
    return True


@contextlib.contextmanager
def donor(answer):
  """A Peer that is nobody's learner; yields its address."""
  method = grpc.unary_stream_rpc_method_handler(answer)
  handlers = grpc.method_handlers_generic_handler(
    "ddiloco.v1.Peer", {"FetchState": method}
  )
  server = grpc.server(futures.ThreadPoolExecutor(2))
  server.add_generic_rpc_handlers((handlers,))
  port = server.add_insecure_port("127.0.0.1:0")
  server.start()
  try:
    yield f"127.0.0.1:{port}"
  finally:
    server.stop(0.0).wait()


def relayed(answer, **settings):
  relay = Relay(WireConfig(), tokens.Tokens(), **settings)
  request = pb.FetchStateRequest(learner_id="ada")
  with donor(answer) as address:
    return list(relay.stream(request, events.Donor("bob", address), Caller()))


def header(num_bytes, donor_id="bob", clock=()):
  return pb.StateChunk(
    header=pb.StateHeader(donor_id=donor_id, num_bytes=num_bytes, clock=clock)
  ).SerializeToString()


def data(num_bytes):
  return pb.StateChunk(data=bytes(num_bytes)).SerializeToString()


def trailer(num_bytes):
  crc32 = zlib.crc32(bytes(num_bytes))
  return pb.StateChunk(trailer=pb.Trailer(crc32=crc32)).SerializeToString()


def test_a_state_passes_as_it_is():
  opening = pb.StateHeader(donor_id="bob", num_bytes=8)
  parts = [pb.StateChunk(header=opening), b"12345678"]
  whole = list(transfer.send(pb.StateChunk, parts[0].header, parts[1:]))

  got = relayed(lambda request, context: map(transfer.serialize, whole))

  assert [bytes(x) if isinstance(x, memoryview) else x for x in got] == whole


def aborting(code, text):
  def answer(request, context):
    context.abort(code, text)
    yield b""

  return answer


def raising(request, context):
  raise RuntimeError("boom")


@pytest.mark.parametrize(
  ("answer", "told"),
  [
    (raising, "boom"),
    (aborting(grpc.StatusCode.ABORTED, "fenced\n\x1b[2J"), r"fenced\?\?\[2J"),
    (aborting(grpc.StatusCode.UNAUTHENTICATED, "wrong token"), "wrong token"),
    (lambda request, context: iter([b"\xff\xff"]), "part without content"),
    (lambda request, context: iter([data(9)] * 99), "9 bytes of data"),
    (lambda request, context: iter([header(8), data(9)]), "9 bytes arrived"),
    (lambda request, context: iter([header(8)]), "without its trailer"),
    (lambda request, context: iter([]), "opened with nothing"),
    (lambda request, context: iter([header(0, "eve")]), "donor_id is 'eve'"),
    (lambda request, context: iter([header(0, "b\n")]), "donor_id is 'b.n'"),
    (
      lambda request, context: iter([header(0, clock=[pb.Version(n=1)])]),
      "clock is a list of 1",
    ),
  ],
)
def test_what_is_wrong_with_a_donor_is_told_as_its_fault(answer, told, caplog):
  with (
    caplog.at_level(logging.CRITICAL, logger="grpc"),
    pytest.raises(ServiceError, match=f"donor bob: .*{told}") as caught,
  ):
    relayed(answer)

  assert caught.value.code == "UNAVAILABLE"


@pytest.mark.parametrize("chunk", [None, b"", b"x"])
@pytest.mark.parametrize("num_bytes", [1 << 40, 1 << 62])
def test_a_donor_that_announces_more_than_it_sends_is_left(chunk, num_bytes):
  wait = threading.Event().wait

  def answer(request, context):
    yield header(num_bytes)
    while context.is_active() and not wait(0.05):
      if chunk is not None:
        yield pb.StateChunk(data=chunk).SerializeToString()

  begin = time.monotonic()
  with pytest.raises(ServiceError, match="donor bob") as caught:
    relayed(answer, patience_s=0.5)

  assert caught.value.code == "UNAVAILABLE"
  assert time.monotonic() - begin < 10.0


def test_a_donor_that_serves_another_is_worth_asking_again():
  busy = aborting(grpc.StatusCode.RESOURCE_EXHAUSTED, "gives to another")

  with pytest.raises(ServiceError) as caught:
    relayed(busy)

  assert caught.value.code == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("lines", [(0, 1), (1, 0)])
@pytest.mark.parametrize("by_relay", [True, False])
@pytest.mark.parametrize(
  ("name", "said"), [("ada", OWN_TOKEN), ("bob", LEARNER_TOKEN)]
)
def test_a_donor_hears_the_token_that_it_says_itself(
  name, said, by_relay, lines
):
  both = (f"ada {OWN_TOKEN}", LEARNER_TOKEN)
  cfg = WireConfig(token_file=token_file(*(both[i] for i in lines)))
  request, heard = pb.FetchStateRequest(learner_id="eve", donor_id=name), []

  def answer(request, context):
    metadata = dict(context.invocation_metadata())
    heard.append(metadata.get("authorization"))
    yield from (header(8, name), data(8), trailer(8))

  with donor(answer) as address:
    if by_relay:
      relay = Relay(cfg, tokens.read_tokens(cfg))
      list(relay.stream(request, events.Donor(name, address), Caller()))
    else:
      client = Client("127.0.0.1:1", cfg, learner="eve")
      list(client.open_state(request, address))
      client.close()

  assert heard == [f"Bearer {said}"]


def test_a_learner_has_one_relay_at_a_time():
  relay = Relay(WireConfig(), tokens.Tokens())
  request = pb.FetchStateRequest(learner_id="ada")
  parts = [header(18), data(9), data(9)]
  with donor(lambda request, context: iter(parts)) as address:
    who = events.Donor("bob", address)
    first = relay.stream(request, who, Caller())
    next(first)

    with pytest.raises(ServiceError, match="of learner 'ada'"):
      next(relay.stream(request, who, Caller()))
    first.close()
    next(relay.stream(request, who, Caller()))


def test_an_asker_that_takes_nothing_is_cut_off_in_time():
  relay = Relay(WireConfig(), tokens.Tokens(), patience_s=0.2)
  asker, patient = Caller(), Caller()
  parts = [header(18), data(9), data(9), trailer(18)]
  with donor(lambda request, context: iter(parts)) as address:
    who = events.Donor("bob", address)
    stalled = relay.stream(pb.FetchStateRequest(learner_id="ada"), who, asker)
    next(stalled)  # Its thread stands in the sending of this, as it were.
    list(relay.stream(pb.FetchStateRequest(learner_id="eve"), who, patient))

    assert asker.cancelled.wait(10.0)
    stalled.close()

  assert not patient.cancelled.is_set()


def test_an_evicted_asker_is_cut_off_at_once():
  relay = Relay(WireConfig(), tokens.Tokens())
  asker = Caller()
  parts = [header(9), data(9), trailer(9)]
  with donor(lambda request, context: iter(parts)) as address:
    request = pb.FetchStateRequest(learner_id="ada")
    stream = relay.stream(request, events.Donor("bob", address), asker)
    next(stream)
    relay.end("ada")

    assert asker.cancelled.is_set()
    stream.close()
