"""What every Synchronizer must do, whoever carries it: one list, three carriers.

The syncer is the real one: in process, behind gRPC, and behind gRPC with mutual
TLS and tokens. Learners are scripted: they say exactly what a case is about.
"""

import dataclasses
import queue
import threading
import time

import numpy as np
import pytest

from ddiloco_jax.algorithm.fragments import make_layout
from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.events import (
  ZERO,
  Counts,
  Outcome,
  Position,
  Version,
)
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.wire import codec, headers, options, port, transfer
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError
from tests.support.secured import secured
from tests.support.served import Served, wait_for

LAYOUT = make_layout(
  {"a/w": ((2, 3), "float32"), "b": ((4,), "float32")}, "tensor", 2
)
THETA = {
  "a/w": np.arange(6, dtype=np.float32).reshape(2, 3),
  "b": np.full(4, 2.0, np.float32),
}
RULES = Rules(
  num_fragments=2,
  cycle_steps=2,
  max_open_rounds=1,
  quorum=1,
  lease_s=30.0,
  max_learners=3,
  num_shards=4,
  acknowledge_s=5.0,
)
WIRE = options.WireConfig(chunk_bytes=16)  # Several chunks even here.
WAIT_S = 10.0


class Voice:
  """One scripted learner."""

  def __init__(self, sync, name: str, nonce: str, **changes):
    self.sync = sync
    hello = port.Hello(learner=name, nonce=nonce, layout_digest=LAYOUT.digest())
    self.control = sync.join(dataclasses.replace(hello, **changes))
    self.notices: queue.SimpleQueue = queue.SimpleQueue()
    self.step = 0
    threading.Thread(target=self._listen, daemon=True).start()
    self.welcome = self.hear(port.Welcomed)
    self.session = self.welcome.session

  def _listen(self) -> None:
    try:
      for _, notice in self.control.notices():
        self.notices.put(notice)
    except ServiceError as error:
      self.notices.put(error)
    else:
      self.notices.put(None)

  def hear(self, kind):
    """The next notice of a kind; what else arrives is skipped.

    Raises:
      ServiceError: what ended the stream.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
      notice = self.notices.get(timeout=max(0.0, deadline - time.monotonic()))
      if isinstance(notice, kind):
        return notice
      if isinstance(notice, ServiceError):
        raise notice
      assert notice is not None, f"the stream ended before a {kind}"

  def ended_with(self) -> ServiceError | None:
    """What ended the stream; None if it ended well."""
    while True:
      notice = self.notices.get(timeout=WAIT_S)
      if notice is None or isinstance(notice, ServiceError):
        return notice

  def apply_all(self) -> None:
    for p, clock in enumerate(self.welcome.clocks):
      self.apply(p, clock.version)

  def apply(self, p: int, version: Version, counts: Counts = ZERO) -> None:
    self.control.send(
      events.Applied(fragment=p, version=version, step=self.step, counts=counts)
    )

  def report(self, *steps: int) -> None:
    """One step more; `steps` of each fragment, at 100 tokens each."""
    self.step += 1
    self.control.send(
      events.Reported(
        step=self.step, counts=tuple(Counts(n, 100 * n) for n in steps)
      )
    )

  def pulled(self) -> port.PullNotice:
    """Starts to train, and steps until a fragment is pulled from it."""
    self.apply_all()
    self.report(1, 1)
    return self.hear(port.PullNotice)

  def header(self, pull: port.PullNotice, **changes) -> port.ReplyHeader:
    header = port.ReplyHeader(
      session=self.session,
      fragment=pull.fragment,
      round=pull.round,
      attempt=pull.attempt,
      base=Version(1, 0),
      counts=Counts(self.step, 100 * self.step),
      lr_sum=0.0,
      positions=(Position(self.welcome.positions[0].shard, self.step),),
      format="float32",
      num_bytes=len(delta(pull.fragment)),
    )
    return dataclasses.replace(header, **changes)

  def push(self, pull: port.PullNotice, value: float = 0.5, **changes):
    header = self.header(pull, **changes)
    return self.sync.push(header, codec.chunks(delta(pull.fragment, value), 16))


def join(run: Served, name: str, nonce: str = "", **changes) -> Voice:
  return Voice(run.sync, name, nonce or f"nonce-of-{name}", **changes)


def delta(p: int, value: float = 0.5) -> bytearray:
  leaves = LAYOUT.fragment(p)
  fragment = {
    leaf.path: np.full(leaf.shape, value, np.float32) for leaf in leaves
  }
  return codec.encode(fragment, leaves, "float32")


def expect_theta(run: Served, voice: Voice, p: int, minus: float) -> None:
  for path, array in run.theta(p, voice.session).items():
    np.testing.assert_array_equal(array, THETA[path] - np.float32(minus))


CARRIERS = ("in_process", "grpc", "grpc with TLS and tokens")


def serve(rules: Rules, carrier: str) -> Served:
  kind, _, secure = carrier.partition(" ")
  cfg = secured(WIRE) if secure else WIRE
  return Served(THETA, rules, kind, cfg=cfg, learner="ada")


@pytest.fixture(params=CARRIERS)
def make_run(request):
  runs = []

  def make(**changes) -> Served:
    rules = dataclasses.replace(RULES, **changes)
    runs.append(serve(rules, request.param))
    return runs[-1]

  yield make
  for run in runs:
    run.close()


@pytest.fixture
def run(make_run):
  return make_run()


# --- who may speak -------------------------------------------------------------


def test_a_run_says_what_learners_must_know(run):
  spec = run.sync.get_run()

  assert spec == run.syncer.get_run()
  assert spec.layout == LAYOUT


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"layout_digest": "0" * 64}, LAYOUT.digest()),
    ({"run_id": "another"}, "run-1"),
    ({"protocol_version": 2}, "protocol version"),
  ],
)
def test_a_hello_that_differs_from_the_run_is_refused(run, changes, says):
  with pytest.raises(ServiceError, match=says) as caught:
    join(run, "ada", **changes)

  assert caught.value.code == "FAILED_PRECONDITION"


def test_a_live_learner_is_not_replaced_unless_by_takeover(run):
  first = join(run, "ada", "one")
  with pytest.raises(ServiceError, match="takeover") as caught:
    join(run, "ada", "two")

  second = join(run, "ada", "three", takeover=True)

  assert caught.value.code == "FAILED_PRECONDITION"
  assert second.session.incarnation > first.session.incarnation
  assert first.ended_with().code == "ABORTED"


def test_a_fenced_process_does_not_join_again(run):
  join(run, "ada", "one")
  join(run, "ada", "two", takeover=True)

  with pytest.raises(ServiceError) as caught:
    join(run, "ada", "one", takeover=True)

  assert caught.value.code == "ABORTED"


def test_a_new_process_is_admitted_once_the_stream_of_the_old_one_ended(run):
  first = join(run, "ada", "one")
  first.control.close()
  wait_for(lambda: run.all_of(events.Disconnected))

  second = join(run, "ada", "two")

  assert not second.welcome.reconnect
  assert second.session.incarnation > first.session.incarnation


def test_the_same_nonce_is_the_same_incarnation(run):
  first = join(run, "ada", "one")
  first.control.close()
  second = join(run, "ada", "one", bases=(Version(1, 0), Version(1, 0)))

  assert second.welcome.reconnect
  assert second.session == first.session


def test_more_learners_than_the_run_admits_are_refused(run):
  for name in ("ada", "bob", "cyd"):
    join(run, name)

  with pytest.raises(ServiceError, match="max_learners") as caught:
    join(run, "dan")

  assert caught.value.code == "RESOURCE_EXHAUSTED"


def test_learners_read_shards_of_their_own(run):
  voices = [join(run, name) for name in ("ada", "bob", "cyd")]

  shards = [voice.welcome.positions[0].shard for voice in voices]

  assert len(set(shards)) == 3


def test_a_goodbye_ends_the_stream_well(run):
  voice = join(run, "ada")

  voice.control.send(events.Left(reason="done"))

  assert voice.ended_with() is None
  assert not run.all_of(events.Disconnected)


# --- replies ---------------------------------------------------------------------


def test_a_reply_is_merged_once_and_its_learner_told(run):
  voice = join(run, "ada")
  pull = voice.pulled()

  result = voice.push(pull, 0.5)
  published = voice.hear(port.PublishedNotice)

  assert result.outcome == Outcome.ACCEPTED
  assert published.outcome == Outcome.INCLUDED
  assert published.fragment == pull.fragment
  assert published.version == Version(1, 1)
  assert (published.round, published.attempt) == (pull.round, pull.attempt)
  expect_theta(run, voice, pull.fragment, minus=0.5)
  expect_theta(run, voice, 1 - pull.fragment, minus=0.0)


def test_the_same_push_twice_counts_once(run):
  voice = join(run, "ada")
  pull = voice.pulled()
  first = voice.push(pull, 0.5)
  voice.hear(port.PublishedNotice)

  again = voice.push(pull, 0.5)

  assert first.outcome == Outcome.ACCEPTED
  assert again.outcome == Outcome.DUPLICATE
  assert again.first == Outcome.ACCEPTED
  expect_theta(run, voice, pull.fragment, minus=0.5)
  assert merged_tokens(run) == pytest.approx(
    100 * LAYOUT.num_params(pull.fragment) / 10
  )


@pytest.mark.parametrize("secret", ["", "guess", "Geheimnis für 日本"])
def test_a_forged_secret_is_refused(run, secret):
  voice = join(run, "ada")
  pull = voice.pulled()
  forged = dataclasses.replace(voice.session, secret=secret)

  with pytest.raises(ServiceError) as pushed:
    voice.push(pull, session=forged)
  with pytest.raises(ServiceError) as fetched:
    run.sync.fetch(forged, 0, 0, False)

  assert pushed.value.code == fetched.value.code == "UNAUTHENTICATED"
  expect_theta(run, voice, pull.fragment, minus=0.0)


def test_an_id_that_never_joined_is_refused(run):
  stranger = port.Session(learner="eve", incarnation=1, secret="")

  with pytest.raises(ServiceError) as caught:
    run.sync.fetch(stranger, 0, 0, False)

  assert caught.value.code == "UNAUTHENTICATED"


def test_an_old_incarnation_is_refused(run):
  old = join(run, "ada", "one")
  pull = old.pulled()
  new = join(run, "ada", "two", takeover=True)

  with pytest.raises(ServiceError) as caught:
    old.push(pull)

  assert caught.value.code == "ABORTED"
  expect_theta(run, new, pull.fragment, minus=0.0)


def test_a_reply_that_was_not_asked_for_is_refused(run):
  voice = join(run, "ada")
  pull = voice.pulled()

  result = voice.push(dataclasses.replace(pull, round=pull.round + 7))

  assert result.outcome == Outcome.REFUSED
  assert "not asked" in result.reason
  expect_theta(run, voice, pull.fragment, minus=0.0)


def test_a_reply_to_a_version_that_never_was_is_refused(run):
  voice = join(run, "ada")
  pull = voice.pulled()

  result = voice.push(pull, base=Version(1, 99))

  assert result.outcome == Outcome.REFUSED
  assert "99" in result.reason
  expect_theta(run, voice, pull.fragment, minus=0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_reply_that_is_not_finite_is_refused_and_told(run, value):
  voice = join(run, "ada")
  pull = voice.pulled()

  result = voice.push(pull, value)

  assert result.outcome == Outcome.REFUSED
  assert "not finite" in result.reason
  expect_theta(run, voice, pull.fragment, minus=0.0)


@pytest.mark.parametrize("num_bytes", [0, 4, 1 << 40])
def test_an_announced_length_that_the_layout_denies_is_refused(run, num_bytes):
  voice = join(run, "ada")
  pull = voice.pulled()

  with pytest.raises(ServiceError, match=str(num_bytes)) as caught:
    voice.push(pull, num_bytes=num_bytes)

  assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("cut", [slice(0, 4), slice(0, 0)])
def test_a_transfer_shorter_than_announced_leaves_no_trace(run, cut):
  voice = join(run, "ada")
  pull = voice.pulled()
  data = delta(pull.fragment)

  with pytest.raises(ServiceError, match=str(len(data))) as caught:
    run.sync.push(voice.header(pull), codec.chunks(data[cut], 16))
  result = voice.push(pull, 0.25)

  assert caught.value.code == "INVALID_ARGUMENT"
  assert result.outcome == Outcome.ACCEPTED
  voice.hear(port.PublishedNotice)
  expect_theta(run, voice, pull.fragment, minus=0.25)


def test_a_transfer_longer_than_announced_is_refused(run):
  voice = join(run, "ada")
  pull = voice.pulled()
  data = delta(pull.fragment) + b"more"

  with pytest.raises(ServiceError) as caught:
    run.sync.push(voice.header(pull), codec.chunks(data, 16))

  assert caught.value.code == "INVALID_ARGUMENT"


def test_a_reply_in_another_format_is_refused(run):
  voice = join(run, "ada")
  pull = voice.pulled()

  with pytest.raises(ServiceError, match=r"bfloat16.*float32") as caught:
    voice.push(pull, format="bfloat16")

  assert caught.value.code == "INVALID_ARGUMENT"


def test_a_fragment_that_does_not_exist_is_refused(run):
  voice = join(run, "ada")

  with pytest.raises(ServiceError, match="fragment 2") as caught:
    run.sync.fetch(voice.session, 2, 0, False)

  assert caught.value.code == "INVALID_ARGUMENT"


def test_steps_that_go_back_end_the_stream(run):
  voice = join(run, "ada")
  voice.apply_all()
  voice.report(1, 1)
  voice.report(2, 2)
  wait_for(lambda: getattr(run.events[-1], "step", 0) == 2)
  voice.step = 0

  error = fault_of(voice, lambda: voice.report(3, 3))

  assert error.code == "INVALID_ARGUMENT"
  assert "go back" in error.text


def test_counts_for_other_than_all_fragments_end_the_stream(run):
  voice = join(run, "ada")
  voice.apply_all()

  error = fault_of(voice, lambda: voice.report(1, 1, 1))

  assert error.code == "INVALID_ARGUMENT"
  assert "3 fragments" in error.text


# --- versions ----------------------------------------------------------------------


def test_the_last_two_versions_are_served_and_others_named(run):
  voice = join(run, "ada")
  pulls = merge_some(voice, num_merges=6)
  p = pulls[-1].fragment
  newest = [pull.fragment for pull in pulls].count(p)

  kept = {
    n: run.sync.fetch(voice.session, p, n, False)[0].version.n
    for n in (0, newest, newest - 1)
  }
  with pytest.raises(ServiceError, match=f"version {newest - 2}") as older:
    run.sync.fetch(voice.session, p, newest - 2, False)
  with pytest.raises(ServiceError, match=f"version {newest + 1}") as newer:
    run.sync.fetch(voice.session, p, newest + 1, False)

  assert newest >= 3
  assert kept == {0: newest, newest: newest, newest - 1: newest - 1}
  assert older.value.code == newer.value.code == "INVALID_ARGUMENT"


def test_versions_of_a_fragment_are_published_in_order(run):
  watcher = join(run, "bob")
  voice = join(run, "ada")

  merge_some(voice, num_merges=6)

  seen: dict[int, list[int]] = {0: [], 1: []}
  while sum(map(len, seen.values())) < 6:
    published = watcher.hear(port.PublishedNotice)
    assert published.outcome == Outcome.NOT_ASKED
    seen[published.fragment].append(published.version.n)
  for versions in seen.values():
    assert versions == list(range(1, len(versions) + 1))


def test_a_stale_reply_brings_only_its_own_progress(run):
  slow = join(run, "bob")
  slow.apply_all()
  fast = join(run, "ada")
  merge_some(fast, num_merges=4)
  fast.control.send(events.Left(reason="done"))
  fast.ended_with()
  slow.report(1, 1)
  pull = slow.hear(port.PullNotice)
  before = run.theta(pull.fragment, slow.session)

  result = slow.push(pull, 0.125, base=Version(1, 0))
  while slow.hear(port.PublishedNotice).outcome != Outcome.INCLUDED:
    pass

  assert result.outcome == Outcome.ACCEPTED
  assert "staleness 2" in result.reason
  for path, array in run.theta(pull.fragment, slow.session).items():
    np.testing.assert_allclose(array, before[path] - 0.125, rtol=1e-6)


# --- the end -----------------------------------------------------------------------


def test_a_run_ends_with_a_flush_exact_versions_and_a_last_word(run):
  voice = join(run, "ada")
  pull = voice.pulled()

  run.syncer.request_stop("enough")
  ending = voice.hear(port.EndingNotice)
  voice.push(pull, 0.5)
  exact: dict[int, Version] = {}
  while len(exact) < 2:
    notice = voice.hear(port.PullNotice | port.PublishedNotice)
    if isinstance(notice, port.PullNotice):
      voice.push(notice, 0.5)
    elif notice.exact:
      exact[notice.fragment] = notice.version
  for p, version in exact.items():
    header, _ = run.sync.fetch(voice.session, p, 0, True)
    assert (header.version, header.format) == (version, "float32")
    voice.apply(p, version)
  finished = voice.hear(port.FinishedNotice)

  assert "enough" in ending.reason
  assert finished.exit_code == 0
  assert voice.ended_with() is None


def test_a_finished_run_admits_nobody(run):
  run.syncer.request_stop("enough")
  assert run.syncer.wait(WAIT_S)

  with pytest.raises(ServiceError, match="enough") as caught:
    join(run, "ada")

  assert caught.value.code == "FAILED_PRECONDITION"


# --- what only a wire can get wrong --------------------------------------------------


@pytest.fixture(params=CARRIERS[1:])
def wired(request):
  run = serve(RULES, request.param)
  yield run
  run.close()


def push_parts(run: Served, parts) -> pb.PushOutcome:
  with run.sync._faults(0):
    return run.sync._call("PushFragment", 0, "bulk")(iter(parts))


def test_a_wrong_checksum_leaves_no_trace(wired):
  voice = join(wired, "ada")
  pull = voice.pulled()
  header = headers.reply_header_to_pb(voice.header(pull))
  parts = transfer.send(pb.PushChunk, header, [delta(pull.fragment)], crc32=1)

  with pytest.raises(ServiceError, match="checksum") as caught:
    push_parts(wired, parts)
  result = voice.push(pull, 0.25)
  voice.hear(port.PublishedNotice)

  assert caught.value.code == "INVALID_ARGUMENT"
  assert result.outcome == Outcome.ACCEPTED
  expect_theta(wired, voice, pull.fragment, minus=0.25)


@pytest.mark.parametrize("field", ["steps", "tokens"])
def test_a_missing_count_is_an_error_and_not_a_zero(wired, field):
  voice = join(wired, "ada")
  pull = voice.pulled()
  header = headers.reply_header_to_pb(voice.header(pull))
  header.counts.ClearField(field)
  parts = transfer.send(pb.PushChunk, header, [delta(pull.fragment)])

  with pytest.raises(ServiceError, match=f"counts.{field} is miss") as caught:
    push_parts(wired, parts)

  assert caught.value.code == "INVALID_ARGUMENT"


def test_a_broken_upload_leaves_no_trace(wired):
  voice = join(wired, "ada")
  pull = voice.pulled()
  header = headers.reply_header_to_pb(voice.header(pull))
  stop = threading.Event()

  def parts():
    yield pb.PushChunk(header=header)
    yield bytes(delta(pull.fragment)[:16])
    stop.wait(WAIT_S)

  push = wired.sync._call("PushFragment", 0, "bulk")
  call = push.func.future(parts(), **push.keywords)
  wait_for(lambda: wired.all_of(events.Pushing))
  call.cancel()
  stop.set()
  wait_for(lambda: wired.all_of(events.PushBroken))
  result = voice.push(pull, 0.25)
  voice.hear(port.PublishedNotice)

  assert result.outcome == Outcome.ACCEPTED
  expect_theta(wired, voice, pull.fragment, minus=0.25)


def test_a_status_tells_who_takes_part(wired):
  voice = join(wired, "ada")
  voice.pulled()

  status = wired.sync.status()

  assert status.run_id == "run-1"
  assert (status.num_live, status.num_training) == (1, 1)
  assert status.learners[0].learner_id == "ada"
  assert status.waiting_for


# --- helpers of this list --------------------------------------------------------------


def merge_some(voice: Voice, num_merges: int) -> list[port.PullNotice]:
  """Trains, answers and adopts until so many versions came out."""
  voice.apply_all()
  pulls, base = [], [Version(1, 0), Version(1, 0)]
  steps = [0, 0]
  while len(pulls) < num_merges:
    steps = [n + 1 for n in steps]
    voice.report(*steps)
    try:
      pull = voice.hear(port.PullNotice)
    except queue.Empty:
      raise AssertionError(f"no pull after {len(pulls)} merges") from None
    p = pull.fragment
    counts = Counts(steps[p], 100 * steps[p])
    result = voice.push(pull, 0.5, base=base[p], counts=counts)
    assert result.outcome == Outcome.ACCEPTED, result
    published = voice.hear(port.PublishedNotice)
    base[p] = published.version
    voice.apply(p, published.version, counts)
    steps[p] = 0
    pulls.append(pull)
  return pulls


def fault_of(voice: Voice, say) -> ServiceError:
  """What a word on the control stream is refused with, sooner or later."""
  try:
    say()
  except ServiceError as error:
    return error
  error = voice.ended_with()
  assert error is not None
  return error


def merged_tokens(run: Served) -> float:
  books = {book.name: book.tokens for book in run.syncer.status().books}
  return books["merged"]
