"""What callers may hold open, and what those are told who want more."""

import threading

import grpc
import numpy as np
import pytest

from ddiloco_jax.learner.client import Client
from ddiloco_jax.protocol import events
from ddiloco_jax.syncer import limits
from ddiloco_jax.wire import headers, methods, options, port
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError
from ddiloco_jax.wire.tokens import ONLOOKER
from tests.conformance.test_conformance import RULES, THETA, delta, join
from tests.support.served import Served, wait_for


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self) -> float:
    return self.now


@pytest.fixture
def serve():
  runs = []

  def start(**settings) -> Served:
    cfg = options.WireConfig(chunk_bytes=16, **settings)
    runs.append(Served(THETA, RULES, cfg=cfg))
    return runs[-1]

  yield start
  for run in runs:
    run.close()


def test_a_fleet_may_come_at_once_and_then_at_a_rate():
  clock = Clock()
  rate = limits.Rate(4.0, "joins", "wire.joins_per_s", clock)
  for _ in range(40):
    rate.take()

  with pytest.raises(ServiceError, match=r"4 joins a second.*wire") as caught:
    rate.take()
  clock.now += 0.5
  rate.take()
  rate.take()
  with pytest.raises(ServiceError):
    rate.take()

  assert caught.value.code == "RESOURCE_EXHAUSTED"
  assert caught.value.is_worth_retrying


def test_slots_are_of_one_caller_and_of_all():
  slots = limits.Slots(3, "transfers", "wire.x", 2, "wire.y")

  with slots.one("ada"), slots.one("ada"):
    with (
      pytest.raises(
        ServiceError, match=r"2 transfers of learner 'ada' are open; 2.*wire.y"
      ),
      slots.one("ada"),
    ):
      pass
    with (
      slots.one("bob"),
      pytest.raises(ServiceError, match=r"3 transfers are open; 3.*wire.x"),
      slots.one("cyd"),
    ):
      pass
  with slots.one("ada"), slots.one("ada"):
    pass


def test_whoever_has_nothing_open_is_kept_a_place():
  slots = limits.Slots(4, "transfers", "wire.x", num_callers=3)

  with slots.one("ada"), slots.one("ada"):
    with (
      pytest.raises(
        ServiceError, match=r"2 transfers are open; 4.*wire.x.*2 of it for"
      ),
      slots.one("ada"),
    ):
      pass
    with slots.one("bob"), slots.one("cyd"):
      pass
    with (
      slots.one("bob"),
      pytest.raises(ServiceError, match="1 of it for"),
      slots.one("bob"),
    ):
      pass


def test_all_that_one_caller_has_open_can_be_ended():
  slots, ended = limits.Slots(4, "transfers", "wire.x"), []

  with (
    slots.one("ada", lambda: ended.append(1)),
    slots.one("ada", lambda: ended.append(2)),
    slots.one("bob", lambda: ended.append(3)),
  ):
    slots.end("ada")
  slots.end("bob")

  assert ended == [1, 2]


def test_a_join_beyond_the_rate_is_told_to_come_again(serve):
  run = serve(joins_per_s=0.1)
  join(run, "ada")

  with pytest.raises(ServiceError, match=r"wire\.joins_per_s") as caught:
    join(run, "bob")

  assert caught.value.code == "RESOURCE_EXHAUSTED"
  assert caught.value.retry_after_s == 1.0


def test_watchers_are_bounded_and_learners_go_on_beside_them(serve):
  run = serve(max_watchers=2, max_calls=8)
  clients = [Client(run.address, learner=ONLOOKER) for _ in range(3)]
  watches = [client.watch(3600.0) for client in clients]
  for watch in watches[:2]:
    next(watch)

  with pytest.raises(ServiceError, match=r"wire\.max_watchers") as caught:
    next(watches[2])
  voice = join(run, "ada")
  result = voice.push(voice.pulled())
  watches[0].close()
  wait_for(lambda: _is_served(clients[2]))
  for client in clients:
    client.close()

  assert caught.value.code == "RESOURCE_EXHAUSTED"
  assert result.outcome == events.Outcome.ACCEPTED


def _is_served(client: Client) -> bool:
  try:
    next(client.watch(3600.0))
  except ServiceError:
    return False
  return True


@pytest.mark.parametrize("chunk", [None, b"", b"x"])
def test_a_push_that_stands_still_is_given_up_and_leaves_no_trace(serve, chunk):
  run = serve(progress_timeout_s=0.5)
  voice = join(run, "ada")
  pull = voice.pulled()
  over = threading.Event()

  def parts():
    yield pb.PushChunk(header=headers.reply_header_to_pb(voice.header(pull)))
    yield bytes(delta(pull.fragment)[:4])
    for _ in range(15):
      if over.wait(2.0 if chunk is None else 0.2):
        return
      if chunk is not None:
        yield chunk

  with pytest.raises(grpc.RpcError) as caught:
    run.sync._call("PushFragment", 0, "bulk")(parts())
  over.set()
  result = voice.push(pull)

  assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
  assert "wire.progress_timeout_s" in caught.value.details()
  assert run.all_of(events.PushBroken)
  assert result.outcome == events.Outcome.ACCEPTED


@pytest.mark.parametrize("way", ["nothing is read", "it is evicted"])
def test_who_does_not_read_what_it_fetches_holds_no_place_for_long(way):
  is_evicted = way == "it is evicted"
  cfg = options.WireConfig(
    max_transfers_per_learner=1,
    progress_timeout_s=60.0 if is_evicted else 2.0,
  )
  sizes = {"a": 4_000_000, "b": 4}  # More than any buffer on the way.
  theta = {path: np.zeros(n, np.float32) for path, n in sizes.items()}
  run = Served(theta, RULES, cfg=cfg)
  hello = port.Hello(
    learner="ada", nonce="n", layout_digest=run.layout.digest()
  )
  control = run.sync.join(hello)
  session = next(control.notices())[1].session
  with grpc.insecure_channel(run.address) as channel:
    request = headers.fetch_to_pb(session, 0, 0, False)
    stalled = methods.make_call(channel, "FetchFragment")(request)
    next(stalled)  # It is open; no more is read of it.
    assert _refusal(run, session) == "RESOURCE_EXHAUSTED"
    if is_evicted:
      run.sync.evict("ada", "it reads nothing")
      wait_for(lambda: _refusal(run, session) != "RESOURCE_EXHAUSTED", 5.0)
    else:
      wait_for(lambda: _refusal(run, session) is None, 10.0)

    with pytest.raises(grpc.RpcError) as caught:
      list(stalled)
    assert caught.value.code() == grpc.StatusCode.CANCELLED
  run.close()


def _refusal(run: Served, session: port.Session) -> str | None:
  try:
    run.sync.fetch(session, 1, 0, False)
  except ServiceError as error:
    return error.code
  return None


def test_who_takes_a_fetch_slowly_is_let():
  chunks = [bytes(300)] * 6  # 6 kB/s; 1 kB/s is enough.
  ended = threading.Event()

  with limits.taken(iter(chunks), 0.2, ended.set) as taken:
    got = [(chunk, threading.Event().wait(0.05))[0] for chunk in taken]

  assert got == chunks
  assert not ended.is_set()


def test_empty_chunks_without_end_are_no_progress():
  def flood():
    while True:
      yield b""

  with (
    limits.moving(flood(), 0.2) as moving,
    pytest.raises(ServiceError, match=r"wire\.progress_timeout_s"),
  ):
    next(moving)


def test_who_takes_its_time_over_chunks_blames_nobody():
  chunks = [b"ab"] * 6

  with limits.moving(iter(chunks), 0.2) as moving:
    got = [(chunk, threading.Event().wait(0.1))[0] for chunk in moving]

  assert got == chunks
