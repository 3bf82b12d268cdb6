"""The wire over real gRPC, with a synchronizer small enough to read."""

import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
import zlib
from collections.abc import Iterator

import grpc
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
  ProtoReflectionDescriptorDatabase,
)

from ddiloco_jax.algorithm.fragments import make_layout
from ddiloco_jax.learner.client import Client
from ddiloco_jax.learner.patience import Patience
from ddiloco_jax.protocol import events, machine
from ddiloco_jax.protocol import status as protocol_status
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.syncer.errors import InUse
from ddiloco_jax.syncer.server import Server
from ddiloco_jax.syncer.service import Service
from ddiloco_jax.wire import codec, headers, options, port, transfer
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError
from ddiloco_jax.wire.tokens import ONLOOKER
from tests.support.served import wait_for

LAYOUT = make_layout(
  {"a/w": ((3, 5), "float32"), "b": ((), "float32")}, "tensor", 2
)
SESSION = port.Session(learner="ada", incarnation=1, secret="s")
HELLO = port.Hello(learner="ada", nonce="n", layout_digest=LAYOUT.digest())


class EchoControl:
  """Welcomes, and answers every message with a stamp that counts them."""

  def __init__(self, epoch: int = 1):
    self.said: list[port.Upward] = []
    self.closed = threading.Event()
    self._notices: queue.SimpleQueue = queue.SimpleQueue()
    welcomed = port.Welcomed(
      session=SESSION,
      run_id="r",
      epoch=epoch,
      clocks=(events.FragmentClock(events.Version(1, 0), 0),) * 2,
      positions=(),
      reconnect=False,
    )
    self._notices.put((port.Stamp(), welcomed))

  def send(self, message: port.Upward) -> None:
    self.said.append(message)
    if isinstance(message, events.Left):
      self._notices.put(None)
    else:
      stamp = port.Stamp(t=len(self.said))
      self._notices.put((stamp, port.HeartbeatNotice()))

  def tell(self, notice: port.Notice) -> None:
    self._notices.put((port.Stamp(), notice))

  def notices(self) -> Iterator[tuple[port.Stamp, port.Notice]]:
    while (item := self._notices.get()) is not None:
      yield item

  def close(self) -> None:
    self.closed.set()
    self._notices.put(None)


class Store:
  """Keeps what was pushed whole, and serves it again."""

  max_learners = 4

  def __init__(self, run: port.RunSpec, epoch: int = 1):
    self.run = run
    self.epoch = epoch
    self.controls: list[EchoControl] = []
    self.pushed: dict[int, bytes] = {}
    self.broken: queue.SimpleQueue = queue.SimpleQueue()
    self.num_chunks = 0
    self.phase = "training"

  def get_run(self) -> port.RunSpec:
    return self.run

  def join(self, hello: port.Hello) -> EchoControl:
    if hello.layout_digest != self.run.layout.digest():
      raise ServiceError("FAILED_PRECONDITION", "another layout")
    self.controls.append(EchoControl(self.epoch))
    return self.controls[-1]

  def push(self, header: port.ReplyHeader, chunks) -> port.PushResult:
    whole = bytearray()
    try:
      for chunk in chunks:
        self.num_chunks += 1
        whole += chunk
    except ServiceError as error:
      self.broken.put(error)
      raise
    self.pushed[header.fragment] = bytes(whole)
    return port.PushResult(outcome=events.Outcome.ACCEPTED, reason="whole")

  def fetch(self, session, fragment, n, exact):
    if session != SESSION:
      raise ServiceError("UNAUTHENTICATED", "not the secret of a welcome")
    data = self.pushed[fragment]
    header = port.FragmentHeader(
      fragment=fragment,
      version=events.Version(1, 7),
      format="float32",
      num_bytes=len(data),
    )
    return header, data

  def status(self):
    state = machine.initial(Rules(num_fragments=2, cycle_steps=4))
    return dataclasses.replace(
      protocol_status.status(state, now=1.5),
      run_id="r",
      phase=self.phase,
      learners=(LEARNER,),
      counters={"late": 3},
      alarms=("!",),
    )


LEARNER = protocol_status.LearnerStatus(
  learner="ada",
  incarnation=4,
  live=True,
  training=True,
  contributing=False,
  exhausted=False,
  step=7,
  step_s=0.5,
  silent_s=0.1,
  metrics=(("loss", 2.5),),
  note="joined late",
)


def make_run(**changes) -> port.RunSpec:
  run = port.RunSpec(
    run_id="r",
    epoch=1,
    layout=LAYOUT,
    cycle_steps=4,
    max_open_rounds=2,
    quorum=1,
    alpha=0.0,
    up_format="float32",
    down_format="float32",
    chunk_bytes=16,
    lease_s=5.0,
  )
  return dataclasses.replace(run, **changes)


@contextlib.contextmanager
def serving(store, cfg: options.WireConfig | None = None):
  cfg = cfg or options.WireConfig()
  server = Server("127.0.0.1:0", cfg)
  server.serve(store)
  client = Client(server.address, cfg, learner="ada")
  try:
    yield server, client
  finally:
    client.close()
    server.stop(0.0)


def reply_header(fragment: int, num_bytes: int) -> port.ReplyHeader:
  return port.ReplyHeader(
    session=SESSION,
    fragment=fragment,
    round=0,
    attempt=0,
    base=events.Version(1, 0),
    counts=events.Counts(1, 2),
    lr_sum=0.5,
    positions=(events.Position(0, 3),),
    format="float32",
    num_bytes=num_bytes,
  )


def push_parts(client: Client, parts) -> pb.PushOutcome:
  call = client._call("PushFragment", 0, "bulk")
  return call(iter(parts))


def test_the_run_arrives_as_it_is():
  run = make_run(settings_json='{"x": 1}', alpha=0.25, max_ahead=3)

  with serving(Store(run)) as (_, client):
    assert client.get_run() == run


def test_a_fragment_comes_back_as_it_was_pushed_in_chunks():
  store = Store(make_run())
  leaves = LAYOUT.fragment(0)
  array = np.arange(15, dtype=np.float32).reshape(3, 5)
  data = codec.encode({"a/w": array}, leaves, "float32")

  with serving(store) as (_, client):
    header = reply_header(0, len(data))
    result = client.push(header, codec.chunks(data, 16))
    fetched, back = client.fetch(SESSION, 0, 0, exact=False)

  assert result == port.PushResult(
    outcome=events.Outcome.ACCEPTED, reason="whole"
  )
  assert store.num_chunks == 4
  assert fetched.version == events.Version(1, 7)
  assert fetched.num_bytes == len(back) == 60
  np.testing.assert_array_equal(
    codec.decode(back, leaves, "float32")["a/w"], array
  )


def test_control_messages_arrive_in_order_and_answers_come_back():
  store = Store(make_run())
  told = [
    events.Applied(
      fragment=i % 2, version=events.Version(1, i), step=i, counts=(i, 2 * i)
    )
    for i in range(50)
  ]
  told = [
    dataclasses.replace(one, counts=events.Counts(*one.counts)) for one in told
  ]

  with serving(store) as (_, client):
    control = client.join(HELLO)
    notices = control.notices()
    _, welcomed = next(notices)
    for message in told:
      control.send(message)
    stamps = [next(notices)[0].t for _ in told]
    control.send(events.Left(reason="done"))
    rest = list(notices)
    control.close()

  assert isinstance(welcomed, port.Welcomed)
  assert welcomed.session == SESSION
  assert stamps == list(range(1, 51))
  assert rest == []
  assert store.controls[0].said == [*told, events.Left(reason="done")]


def test_a_stream_that_ends_without_goodbye_is_closed():
  store = Store(make_run())

  with serving(store) as (_, client):
    control = client.join(HELLO)
    next(control.notices())
    control.close()

    assert store.controls[0].closed.wait(5)
    assert list(control.notices()) == []


def test_a_refused_hello_is_raised_by_its_notices():
  with serving(Store(make_run())) as (_, client):
    control = client.join(dataclasses.replace(HELLO, layout_digest="other"))
    with pytest.raises(ServiceError, match="another layout") as caught:
      next(control.notices())

  assert caught.value.code == "FAILED_PRECONDITION"


def test_a_wrong_checksum_is_refused_before_the_reply_counts():
  store = Store(make_run())
  header = headers.reply_header_to_pb(reply_header(1, 4))
  parts = list(transfer.send(pb.PushChunk, header, [b"abcd"]))
  parts[-1].trailer.crc32 ^= 1

  with serving(store) as (_, client), pytest.raises(grpc.RpcError) as caught:
    push_parts(client, parts)

  assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
  assert f"{zlib.crc32(b'abcd'):#010x}" in caught.value.details()
  assert store.pushed == {}


@pytest.mark.parametrize(
  ("spoil", "says"),
  [
    (lambda parts: parts[1:], "must open with its header"),
    (lambda parts: parts[:-1], "without its trailer"),
    (lambda parts: [parts[0], b"ab", parts[2]], "2 bytes arrived"),
    (lambda parts: [parts[0], b"abcde", parts[2]], "5 bytes arrived"),
    (lambda parts: [parts[0], *parts], "a header within a transfer"),
    (lambda parts: [], "opened with nothing"),
  ],
)
def test_a_malformed_transfer_is_refused(spoil, says):
  store = Store(make_run())
  header = headers.reply_header_to_pb(reply_header(1, 4))
  parts = spoil(list(transfer.send(pb.PushChunk, header, [b"abcd"])))

  with (
    serving(store) as (_, client),
    pytest.raises(grpc.RpcError, match=says) as caught,
  ):
    push_parts(client, parts)

  assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
  assert store.pushed == {}


def test_a_broken_upload_is_seen_by_the_syncer():
  store = Store(make_run())
  header = headers.reply_header_to_pb(reply_header(0, 60))

  def parts(stop: threading.Event):
    yield pb.PushChunk(header=header)
    yield b"x" * 16
    stop.wait(10)

  with serving(store) as (_, client):
    stop = threading.Event()
    push = client._call("PushFragment", 0, "bulk")
    call = push.func.future(parts(stop), **push.keywords)
    while not store.num_chunks:
      time.sleep(0.01)
    call.cancel()
    error = store.broken.get(timeout=5)
    stop.set()

  assert "16 of 60 bytes" in error.text
  assert "nothing of it is kept" in error.text


def test_a_wrong_secret_is_refused_with_its_code():
  session = dataclasses.replace(SESSION, secret="forged")

  with (
    serving(Store(make_run())) as (_, client),
    pytest.raises(ServiceError) as caught,
  ):
    client.fetch(session, 0, 0, exact=False)

  assert caught.value.code == "UNAUTHENTICATED"


def test_an_error_of_a_long_text_arrives_as_what_it_is():
  store = Store(make_run())
  store.get_run = lambda: refuse("\u2620" * 100_000)

  def refuse(text):
    raise ServiceError("FAILED_PRECONDITION", text)

  with (
    serving(store) as (_, client),
    pytest.raises(ServiceError) as caught,
  ):
    client.get_run()

  assert caught.value.code == "FAILED_PRECONDITION"
  assert set(caught.value.text) == {"\u2620"}


def test_a_fault_of_the_syncer_ends_the_stream_and_is_not_swallowed():
  store = Store(make_run())

  with serving(store) as (_, client):
    control = client.join(HELLO)
    notices = control.notices()
    next(notices)
    store.controls[0].said = None  # Whatever is said next finds no place.
    control.send(events.Heard())
    with pytest.raises(ServiceError, match="append") as caught:
      list(notices)

  assert caught.value.code == "INTERNAL"


def test_no_syncer_is_unavailable_and_the_next_address_is_tried():
  with serving(Store(make_run())) as (server, _):
    client = Client(("127.0.0.1:1", server.address), learner=ONLOOKER)
    with pytest.raises(ServiceError, match=r"127\.0\.0\.1:1") as caught:
      client.get_run()
    run = client.get_run()
    client.close()

  assert caught.value.is_worth_retrying
  assert run == make_run()


def test_an_older_epoch_is_refused_and_the_next_address_is_tried():
  # A syncer that was stopped, taken over from, and goes on.
  new = Store(make_run(epoch=2), epoch=2)
  with serving(new) as (server, _), serving(Store(make_run())) as (old, _):
    client = Client((server.address, old.address), learner="ada")
    assert client.get_run().epoch == 2
    client._leave(0)  # As after a broken connection.
    with pytest.raises(ServiceError, match=f"{old.address} serves epoch 1"):
      client.get_run()
    assert next(client.join(HELLO).notices())[1].epoch == 2
    client._leave(0)
    with pytest.raises(ServiceError, match="epoch 2") as caught:
      next(client.join(HELLO).notices())
    assert client.get_run().epoch == 2
    client.close()

  assert caught.value.is_worth_retrying


def test_two_calls_that_fail_at_one_address_leave_it_once():
  client = Client(("127.0.0.1:1", "127.0.0.1:2"), learner=ONLOOKER)
  client._leave(0)
  client._leave(0)
  with pytest.raises(ServiceError, match=r"127\.0\.0\.1:2"):
    client.get_run()
  client.close()


def test_forty_learners_wait_and_a_status_is_answered_within_a_second():
  store = Store(make_run())

  with serving(store) as (_, client):
    controls = [
      client.join(dataclasses.replace(HELLO, learner=f"l{i}"))
      for i in range(40)
    ]
    for control in controls:
      next(control.notices())
    start = time.monotonic()
    status = client.status()
    waited_s = time.monotonic() - start
    for control in controls:
      control.close()

  assert waited_s < 1.0
  assert status.run_id == "r"
  assert status.time_s == 1.5
  assert dict(status.counters) == {"late": 3}
  assert list(status.alarms) == ["!"]
  assert len(status.fragments) == 2
  assert status.learners[0].learner_id == "ada"
  assert dict(status.learners[0].metrics) == {"loss": 2.5}


def test_a_watch_ends_with_the_run():
  store = Store(make_run())

  with serving(store) as (_, client):
    watch = client.watch(0.1)
    phases = [next(watch).phase, next(watch).phase]
    store.phase = "finished"
    phases += [status.phase for status in watch]

  assert phases[:2] == ["training", "training"]
  assert phases[-1] == "finished"
  assert phases.count("finished") == 1


def test_a_watch_that_was_over_at_once_holds_no_thread():
  class Gone:
    def add_callback(self, callback):
      return False

  cfg = options.WireConfig()
  service = Service(Store(make_run()), cfg, None, None)

  assert not list(service.WatchStatus(pb.WatchStatusRequest(), Gone()))


def test_an_idle_learner_is_not_thrown_off_for_its_pings():
  cfg = options.WireConfig(keepalive_s=1.0, keepalive_timeout_s=5.0)
  store = Store(make_run())

  with serving(store, cfg) as (_, client):
    control = client.join(HELLO)
    notices = control.notices()
    next(notices)
    time.sleep(4.5)  # By gRPC's own defaults the third ping is one too many.
    control.send(events.Heard())
    stamp, _ = next(notices)
    control.close()

  assert stamp.t == 1
  assert len(store.controls) == 1


@pytest.mark.slow
def test_an_idle_learner_stays_for_ninety_seconds_by_default():
  store = Store(make_run())

  with serving(store) as (_, client):
    control = client.join(HELLO)
    notices = control.notices()
    next(notices)
    time.sleep(90.0)
    control.send(events.Heard())
    stamp, _ = next(notices)
    control.close()

  assert stamp.t == 1


@pytest.mark.parametrize(
  "method",
  [
    "ddiloco.v1.Synchronizer/Join",
    "ddiloco.v1.Synchronizer/PushFragment",
    "ddiloco.v1.Synchronizer/GetStatus",
    "ddiloco.v1.Synchronizer/FetchFragment",
    "grpc.health.v1.Health/Check",
    "grpc.health.v1.Health/Watch",
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
  ],
)
def test_calls_that_say_nothing_do_not_keep_the_servers_threads(method):
  cfg = options.WireConfig(max_calls=4, call_timeout_s=2.0)
  silent = threading.Event()

  def nothing():
    silent.wait(30)
    yield b""

  with (
    serving(Store(make_run()), cfg) as (server, client),
    grpc.insecure_channel(server.address) as channel,
  ):
    open_stream = channel.stream_stream(f"/{method}")
    streams = [open_stream(nothing()) for _ in range(8)]
    # While some are silent; as a learner calls, that is, again if need be.
    patience = Patience("ada", 0.5, lambda: False)
    run = patience.call(client.get_run, 20.0, "GetRun")
    told = {(stream.code(), stream.details()) for stream in streams}
    silent.set()

  ((code, late),) = told
  assert code is grpc.StatusCode.UNAVAILABLE
  assert "did not come within 2 s" in late
  assert run == make_run()
  wait_for(
    lambda: (
      "first-message" not in [thread.name for thread in threading.enumerate()]
    )
  )


def test_a_port_in_use_is_named_with_the_reason():
  with serving(Store(make_run())) as (server, _):
    with pytest.raises(InUse, match=rf"{server.port}.*in use"):
      Server(server.address, options.WireConfig())
    address = f"localhost:{server.port}"
    with pytest.raises(InUse, match="in use"):
      Server(address, options.WireConfig())


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "pod-7:0"])
def test_an_address_beyond_loopback_is_refused_without_tls(address):
  with pytest.raises(ValueError, match=r"without TLS.*wire\.insecure"):
    Server(address, options.WireConfig())


def test_an_address_beyond_loopback_is_served_where_the_user_says_so():
  cfg = options.WireConfig(insecure=True)

  server = Server("0.0.0.0:0", cfg)
  server.serve(Store(make_run()))
  client = Client(f"127.0.0.1:{server.port}", cfg, learner=ONLOOKER)

  assert client.get_run() == make_run()
  client.close()
  server.stop(0.0)


@pytest.mark.parametrize(
  "address", ["8470", ":8470", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999"]
)
def test_a_malformed_address_is_refused_with_an_example(address):
  with pytest.raises(ValueError, match=r"HOST:PORT, such as 127\.0\.0\.1"):
    Server(address, options.WireConfig())


def test_health_and_reflection_answer_as_users_expect():
  with (
    serving(Store(make_run())) as (server, _),
    grpc.insecure_channel(server.address) as channel,
  ):
    check = health_pb2_grpc.HealthStub(channel).Check(
      health_pb2.HealthCheckRequest(service="ddiloco.v1.Synchronizer")
    )
    database = ProtoReflectionDescriptorDatabase(channel)
    services = database.get_services()
    file = database.FindFileContainingSymbol("ddiloco.v1.Synchronizer")

  assert check.status == health_pb2.HealthCheckResponse.SERVING
  assert set(services) == {
    "ddiloco.v1.Synchronizer",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
  }
  assert file.name == "ddiloco/v1/synchronizer.proto"


def test_a_stopped_server_is_unavailable():
  store = Store(make_run())

  with serving(store) as (server, client):
    control = client.join(HELLO)
    notices = control.notices()
    next(notices)
    server.stop(0.1)
    with pytest.raises(ServiceError) as caught:
      list(notices)

  assert caught.value.code == "UNAVAILABLE"
  assert store.controls[0].closed.wait(5)


def test_no_message_sent_is_larger_than_a_chunk_and_its_frame():
  layout = make_layout({"w": ((1 << 21,), "float32")}, "tensor", 1)
  store = Store(make_run(layout=layout, chunk_bytes=1 << 20))
  data = np.random.default_rng(0).bytes(8 << 20)
  up = []

  def take(messages, context):
    up.extend(map(len, messages))
    return pb.PushOutcome(outcome=pb.OUTCOME_ACCEPTED).SerializeToString()

  with receiving_raw("PushFragment", take) as address:
    client = Client(address, learner="ada")
    client.push(reply_header(0, len(data)), codec.chunks(data, 1 << 20))
    client.close()
  with serving(store) as (server, client):
    client.push(reply_header(0, len(data)), codec.chunks(data, 1 << 20))
    with grpc.insecure_channel(server.address) as channel:
      fetch = channel.unary_stream("/ddiloco.v1.Synchronizer/FetchFragment")
      request = headers.fetch_to_pb(SESSION, 0, 0, False)
      down = [len(raw) for raw in fetch(request.SerializeToString())]

  for sizes in (up, down):
    assert len(sizes) == 1 + 8 + 1
    assert sum(sizes) > len(data)
    assert max(sizes) <= (1 << 20) + 4


@contextlib.contextmanager
def receiving_raw(name, method):
  """A server of plain gRPC, with its default limits and no parsing."""
  server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
  handler = grpc.stream_unary_rpc_method_handler(method)
  server.add_generic_rpc_handlers(
    (
      grpc.method_handlers_generic_handler(
        "ddiloco.v1.Synchronizer", {name: handler}
      ),
    )
  )
  port = server.add_insecure_port("127.0.0.1:0")
  server.start()
  yield f"127.0.0.1:{port}"
  server.stop(None).wait()


@hypothesis.given(st.binary(min_size=0, max_size=300))
def test_a_chunk_is_framed_as_protobuf_frames_it(data):
  ours = transfer.serialize(data)
  parse = transfer.parser(pb.PushChunk)

  assert ours == pb.PushChunk(data=data).SerializeToString()
  assert bytes(parse(ours)) == data


def test_a_chunk_framed_in_an_unusual_way_is_read_too():
  unknown_field = b"\x7a\x01x"
  message = unknown_field + pb.PushChunk(data=b"abc").SerializeToString()

  assert transfer.parser(pb.PushChunk)(message) == b"abc"


def test_a_pace_holds_bytes_to_its_rate():
  now, slept = [100.0], []

  def sleep(seconds):
    slept.append(seconds)
    now[0] += seconds

  pace = transfer.Pace(1000, now=lambda: now[0], sleep=sleep)
  for _ in range(5):
    pace.wait(500)

  assert slept == pytest.approx([0.5] * 4)
