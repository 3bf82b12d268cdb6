"""A process that joins a run under way takes a peer's inner state, or says why not."""

import contextlib
import logging
import threading

import grpc
import numpy as np
import pytest

from ddiloco_jax.learner import peer
from ddiloco_jax.learner.patience import Stopped
from ddiloco_jax.protocol import events, tape
from ddiloco_jax.wire import methods
from ddiloco_jax.wire.options import WireConfig
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError
from tests.support.over_grpc import (
  SHAPES,
  LoopLearner,
  learners,
  served_run,
  settings,
)
from tests.support.quadratic import Gate, Momentum
from tests.support.secured import LEARNER_TOKEN, token_file
from tests.support.served import wait_for

OWN_TOKEN = "a-token-of-ada-alone-0123456789"


def momentum(step_s=0.01, shapes=None):
  wait = threading.Event().wait
  return Momentum(shapes or SHAPES, 1.0, 0.05, lambda: wait(step_s))


def versions(run):
  return [f.version.n for f in run.status().fragments]


def incarnation_of(run, name):
  return {x.learner: x.incarnation for x in run.status().learners}[name]


def recoveries(run):
  lines = tape.Reader(run.directory / "tape.jsonl").lines()
  return [x.event for x in lines if isinstance(x.event, events.Recovered)]


def recovery_of(run, name):
  return [x for x in recoveries(run) if x.learner == name]


def donor_and(run, **donor):
  """A donor that trains, in a run that has merged."""
  return LoopLearner(
    run.address, "donor", momentum(), **{"state_address": "", **donor}
  )


def test_a_joining_learner_has_the_bits_of_the_donors_boundary(tmp_path):
  with served_run(settings(quorum=1), tmp_path) as run:
    donor = donor_and(run)
    joiner = LoopLearner(run.address, "joiner", momentum())
    with learners(donor):
      wait_for(lambda: min(versions(run)) >= 1)
      with learners(joiner):
        wait_for(lambda: len(joiner.steps) >= 5)

    (told,) = recoveries(run)
    given, (got,) = donor.trainer.given[-1], joiner.trainer.got
    assert (told.learner, told.source, told.donor) == (
      "joiner",
      "peer",
      "donor",
    )
    assert given.keys() == got.keys()
    for path in given:
      np.testing.assert_array_equal(given[path], got[path])
    assert given["inner/age"] > 0
    # It counts its own steps only, from the syncer's own fragments.
    first = joiner.adopted[0]
    assert first[3] == events.Counts()
    state = run.syncer.snapshot()[1]
    assert "from peer donor" in state.learners["joiner"].recovered


def test_the_first_learners_of_a_run_ask_nobody(tmp_path):
  with served_run(settings(quorum=2), tmp_path) as run:
    both = [
      LoopLearner(run.address, name, momentum(), state_address="")
      for name in "ab"
    ]
    with learners(*both):
      wait_for(lambda: min(versions(run)) >= 1)

    assert not recoveries(run)
    assert not both[0].trainer.got
    assert not both[1].trainer.got


class Unreachable:
  """A client that reaches the syncer, and no peer."""

  def __init__(self, client):
    self._client = client

  def __getattr__(self, name):
    return getattr(self._client, name)

  def open_state(self, request, address):
    if address:
      assert not request.session_secret
      raise ServiceError("UNAVAILABLE", "a partition, which this test makes")
    return self._client.open_state(request, address)


def test_a_donor_that_is_not_reached_is_relayed_by_the_syncer(tmp_path):
  with served_run(settings(quorum=1), tmp_path) as run:
    donor = donor_and(run)
    joiner = LoopLearner(run.address, "joiner", momentum(), wrap=Unreachable)
    with learners(donor):
      wait_for(lambda: min(versions(run)) >= 1)
      with learners(joiner):
        wait_for(lambda: len(joiner.steps) >= 5)

    (told,) = recoveries(run)
    assert (told.source, told.donor) == ("relay", "donor")
    assert "a partition" in told.reason
    given, (got,) = donor.trainer.given[-1], joiner.trainer.got
    for path in given:
      np.testing.assert_array_equal(given[path], got[path])


@pytest.mark.parametrize(
  ("name", "line", "source"),
  [("ada", f"ada {OWN_TOKEN}", "relay"), ("bob", LEARNER_TOKEN, "peer")],
)
def test_who_has_a_token_of_its_own_gives_its_state_to_the_syncer_only(
  tmp_path, name, line, source
):
  # Of its own line, or of any id, each has what it needs and no more.
  cfg = settings(
    quorum=1, wire__token_file=token_file(f"ada {OWN_TOKEN}", LEARNER_TOKEN)
  )
  own, shared = (
    WireConfig(token_file=token_file(x)) for x in (line, LEARNER_TOKEN)
  )
  with served_run(cfg, tmp_path) as run:
    donor = LoopLearner(
      run.address, name, momentum(), state_address="", wire=own
    )
    joiner = LoopLearner(run.address, "joiner", momentum(), wire=shared)
    with learners(donor):
      wait_for(lambda: min(versions(run)) >= 1)
      with learners(joiner):
        wait_for(lambda: len(joiner.steps) >= 5)

    (told,) = recoveries(run)
    assert (told.source, told.donor) == (source, name)
    assert told.reason.startswith("at its step")  # At once: none was tried.


def test_where_a_donor_is_silent_another_one_is_asked(tmp_path):
  gate = Gate(0.005)
  # Without the silent one nothing is merged: it has applied all that there is.
  with served_run(settings(quorum=2, lease_s=60.0), tmp_path) as run:
    silent = LoopLearner(
      run.address,
      "silent",
      Momentum(SHAPES, 1.0, 0.05, gate),
      state_address="",
    )
    joiner = LoopLearner(run.address, "joiner", momentum(), recover_s=3.0)
    other = LoopLearner(run.address, "donor", momentum(0.1), state_address="")
    with learners(silent, other):
      wait_for(lambda: min(versions(run)) >= 1)
      # It is live, and has the most steps.
      wait_for(lambda: len(silent.steps) > len(other.steps) + 100)
      gate.shut()
      with learners(joiner):
        wait_for(lambda: joiner.steps)
      gate.open()

  told = recovery_of(run, "joiner")[-1]
  assert (told.source, told.donor) == ("relay", "donor")
  assert told.reason.count("no byte came for 1 s") == 2
  for path, array in joiner.trainer.got[-1].items():
    np.testing.assert_array_equal(array, other.trainer.given[-1][path])


def test_a_relay_asks_for_the_session_of_a_joined_learner(tmp_path):
  with served_run(settings(quorum=1), tmp_path) as run:
    donor = donor_and(run)
    with learners(donor):
      wait_for(lambda: min(versions(run)) >= 1)
      request = pb.FetchStateRequest(
        learner_id="donor",
        incarnation=1,
        session_secret="forged",
        donor_id="donor",
      )
      with pytest.raises(ServiceError) as caught:
        next(iter(donor.client.open_state(request, "")))

    assert caught.value.code == "UNAUTHENTICATED"
    assert not donor.trainer.given


def test_another_layout_of_the_inner_state_is_not_taken(tmp_path):
  class Other(Momentum):
    def inner_shapes(self):
      return super().inner_shapes() | {"inner/more": ((1,), "float32")}

  with served_run(settings(quorum=1), tmp_path) as run:
    donor = donor_and(run)
    joiner = LoopLearner(run.address, "joiner", Other(SHAPES, 1.0))
    with learners(donor):
      wait_for(lambda: min(versions(run)) >= 1)
      with learners(joiner):
        wait_for(lambda: len(joiner.steps) >= 5)

    (told,) = recoveries(run)
    assert told.source == "fresh"
    assert "inner/more" in told.reason
    assert not joiner.trainer.got


def test_a_donor_that_never_has_the_clock_holds_nobody_up(tmp_path):
  with served_run(settings(quorum=1), tmp_path) as run:
    donor = donor_and(run)
    donor.recovery.give = lambda *args: None  # It comes to no such boundary.
    joiner = LoopLearner(run.address, "joiner", momentum(), recover_s=0.3)
    joiner.recovery.own = "checkpoint"
    with learners(donor):
      wait_for(lambda: min(versions(run)) >= 1)
      with learners(joiner):
        wait_for(lambda: len(joiner.steps) >= 5)

    (told,) = recoveries(run)
    assert told.source == "checkpoint"
    assert "no byte came" in told.reason
    assert not joiner.trainer.got


@pytest.mark.parametrize("told", ["evict", "drain"])
def test_a_learner_that_recovers_while_it_has_to_end_ends(tmp_path, told):
  with served_run(settings(quorum=1), tmp_path) as run:
    donor = donor_and(run)
    donor.recovery.give = lambda *args: None  # It comes to no such boundary.
    joiner = LoopLearner(run.address, "joiner", momentum(), recover_s=300.0)
    with learners(donor):
      wait_for(lambda: min(versions(run)) >= 1)
      with learners(joiner):
        wait_for(lambda: donor.desk._is_taken)

        if told == "evict":
          run.syncer.evict("joiner", "it is slow")
          with pytest.raises(ServiceError, match="it is slow"):
            joiner.end()
        else:
          run.syncer.request_stop("maintenance")
          assert "maintenance" in joiner.end()

        wait_for(lambda: not donor.desk._is_taken)


class Slow:
  """A client whose fetches take their time."""

  def __init__(self, client):
    self._client = client

  def __getattr__(self, name):
    return getattr(self._client, name)

  def fetch(self, *args):
    threading.Event().wait(3.0)
    return self._client.fetch(*args)


def test_a_run_that_finishes_before_a_learner_has_every_fragment_ends_it(
  tmp_path,
):
  cfg = settings(quorum=1, flush_s=0.5, acknowledge_s=0.5)
  with served_run(cfg, tmp_path) as run:
    ada = LoopLearner(run.address, "ada", momentum())
    late = LoopLearner(run.address, "late", momentum(), wrap=Slow)
    with learners(ada, late):
      wait_for(lambda: late.link._shared.welcome and min(versions(run)) >= 1)
      run.syncer.request_stop("maintenance")

      with pytest.raises(Stopped, match="maintenance"):
        late.end()


class Breaking:
  """A client whose first state breaks off when its header has come."""

  def __init__(self, client):
    self._client = client
    self.broken = lambda: None

  def __getattr__(self, name):
    return getattr(self._client, name)

  def open_state(self, request, address):
    call = self._client.open_state(request, address)
    return _Broken(call, self.broken)


class _Broken:
  def __init__(self, call, broken):
    self._call = call
    self._break = broken

  def __iter__(self):
    for number, part in enumerate(self._call):
      if number == 1:
        self._break()
      yield part

  def cancel(self):
    self._call.cancel()


class Heavy(Momentum):
  """With far more inner state than a connection holds under way."""

  def _inner(self):
    return super()._inner() | {"inner/more": np.zeros(1 << 24, np.float32)}


def test_a_donor_that_dies_in_the_transfer_leaves_no_trace(tmp_path):
  made = []

  def breaking(client):
    made.append(Breaking(client))
    return made[-1]

  with served_run(settings(quorum=1), tmp_path) as run:
    wait = threading.Event().wait
    donor, joiner = (
      LoopLearner(
        run.address, name, Heavy(SHAPES, 1.0, 0.02, lambda: wait(0.01)), **more
      )
      for name, more in (
        ("donor", {"state_address": ""}),
        ("joiner", {"wrap": breaking, "recover_s": 5.0}),
      )
    )
    for client in made:
      client.broken = donor.kill
    with learners(donor):
      wait_for(lambda: min(versions(run)) >= 1)
      with learners(joiner):
        wait_for(lambda: len(joiner.steps) >= 3)

    (told,) = recoveries(run)
    assert told.source == "fresh"
    assert "peer:" in told.reason
    assert not joiner.trainer.got


class Dripping:
  """A client whose states bring their header, and then as good as nothing."""

  def __init__(self, client, chunk):
    self._client = client
    self._chunk = chunk

  def __getattr__(self, name):
    return getattr(self._client, name)

  def open_state(self, request, address):
    return _Dripping(self._client.open_state(request, address), self._chunk)


class _Dripping:
  def __init__(self, call, chunk):
    self._call = call
    self._chunk = chunk
    self._is_over = threading.Event()

  def __iter__(self):
    yield next(iter(self._call))
    while not self._is_over.wait(0.1):
      yield self._chunk

  def cancel(self):
    self._is_over.set()
    self._call.cancel()


@pytest.mark.parametrize("chunk", [b"", b"x"])
def test_a_donor_that_drips_keeps_nobody_from_training(tmp_path, chunk):
  with served_run(settings(quorum=1), tmp_path) as run:
    donor = donor_and(run)
    joiner = LoopLearner(
      run.address,
      "joiner",
      momentum(),
      wrap=lambda client: Dripping(client, chunk),
      recover_s=1.5,
    )
    joiner.recovery.own = "checkpoint"
    with learners(donor):
      wait_for(lambda: min(versions(run)) >= 1)
      with learners(joiner):
        wait_for(lambda: joiner.steps)

  (told,) = recoveries(run)
  assert told.source == "checkpoint"
  assert "peer: its state was not whole after 0.5 s" in told.reason or (
    not chunk and "peer: no byte came for 0.5 s" in told.reason
  )
  assert not joiner.trainer.got


def test_a_donor_serves_one_at_a_time_and_is_free_again():
  desk = peer.Desk("donor")
  desk.open("run-1", 0)
  request = pb.FetchStateRequest(
    learner_id="x", run_id="run-1", donor_id="donor"
  )
  gone, asked = threading.Event(), []

  def ask():
    try:
      asked.append(desk.ask(request, gone))
    except ServiceError as error:
      asked.append(error.code)

  first = threading.Thread(target=ask)
  first.start()
  wait_for(lambda: desk._is_taken)
  ask()
  desk.answer(7, (), lambda: {"inner/age": np.zeros(())})
  first.join()
  ask()
  desk.release()
  gone.set()
  ask()
  other = pb.FetchStateRequest(run_id="run-2", donor_id="donor")
  with pytest.raises(ServiceError) as caught:
    desk.ask(other, gone)

  busy, state, again, left = asked
  assert (busy, again, left) == (
    "RESOURCE_EXHAUSTED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
  )
  assert state.step == 7
  assert caught.value.code == "FAILED_PRECONDITION"


def test_a_copy_is_made_at_a_boundary_that_has_the_clock():
  desk = peer.Desk("donor")
  desk.open("run-1", 2)
  request = pb.FetchStateRequest(
    run_id="run-1",
    donor_id="donor",
    clock=[pb.Version(epoch=1, n=3), pb.Version(epoch=1, n=5)],
  )
  got = []
  asking = threading.Thread(
    target=lambda: got.append(desk.ask(request, threading.Event()))
  )
  asking.start()
  wait_for(lambda: desk._asked)

  for step, n in enumerate((4, 5, 6)):
    clock = (events.Version(1, 3), events.Version(1, n))
    desk.answer(step, clock, lambda: {})
  asking.join()

  assert got[0].step == 1
  assert got[0].clock[1].n == 5


@pytest.mark.parametrize(
  ("address", "error"),
  [("0.0.0.0:0", "without TLS"), ("nowhere", "HOST:PORT")],
)
def test_a_state_is_not_served_where_anybody_could_take_it(address, error):
  from ddiloco_jax.wire.options import WireConfig

  with pytest.raises(ValueError, match=error):
    peer.serve_state("0", address, "127.0.0.1:1", WireConfig())


def test_a_learner_that_is_told_to_stop_does_not_wait_for_a_peer(tmp_path):
  with served_run(settings(quorum=1), tmp_path) as run:
    donor = donor_and(run)
    donor.recovery.give = lambda *args: None
    joiner = LoopLearner(run.address, "joiner", momentum())
    with learners(donor):
      wait_for(lambda: min(versions(run)) >= 1)
      with learners(joiner):
        wait_for(lambda: donor.desk._is_taken)
        joiner.stop()
        assert joiner.end(10.0)
        wait_for(lambda: not donor.desk._is_taken)


def test_a_state_of_another_size_than_its_leaves_is_refused():
  from ddiloco_jax.wire import state as states

  array = np.arange(5, dtype=np.float32)
  state = states.State(donor="d", step=1, clock=(), arrays={"inner/x": array})
  shapes = {"inner/x": ((5,), "float32")}
  parts = list(states.parts(state, 8))

  back = states.receive(iter(parts), shapes, states.Asked())
  parts[0].header.num_bytes = 1 << 40
  with pytest.raises(states.OtherState, match="expected"):
    states.receive(iter(parts), shapes, states.Asked())

  np.testing.assert_array_equal(back.arrays["inner/x"], array)


@pytest.mark.parametrize(
  ("donor", "clock", "told"),
  [
    ("eve", ((1, 3), (1, 5)), "'eve'"),
    ("", ((1, 3), (1, 5)), "''"),
    ("d\x1b[31m" * 99, ((1, 3), (1, 5)), "donor_id"),
    ("d", (), "a list of 0"),
    ("d", ((1, 3), (1, 5), (1, 5)), "a list of 3"),
    ("d", ((1, 3), (1, 4)), "4"),
    ("d", ((1, 3), (1, -1)), "-1"),
    ("d", ((1, 3), (1, 2**60)), "2.53"),
  ],
)
def test_a_state_that_was_not_asked_for_is_refused(donor, clock, told):
  from ddiloco_jax.wire import state as states

  clock = tuple(events.Version(*version) for version in clock)
  state = states.State(donor=donor, step=1, clock=clock, arrays={})
  asked = states.Asked(
    clock=(events.Version(1, 3), events.Version(1, 5)), donor="d"
  )

  with pytest.raises(ServiceError, match=told) as caught:
    states.receive(states.parts(state, 8), {}, asked)

  assert caught.value.code == "INVALID_ARGUMENT"
  assert caught.value.text.isprintable()


@pytest.mark.parametrize("donor", ["me", "silent", "../etc"])
def test_a_relayed_state_is_of_another_learner_that_was_not_left(donor):
  from ddiloco_jax.wire import state as states

  state = states.State(donor=donor, step=1, clock=(), arrays={})
  asked = states.Asked(but_not=("me", "silent"))

  with pytest.raises(ServiceError, match="donor_id") as caught:
    states.receive(states.parts(state, 8), {}, asked)

  assert caught.value.code == "INVALID_ARGUMENT"


class Lying:
  """A client whose states are of somebody, or of some clock, not asked for."""

  def __init__(self, client, field):
    self._client = client
    self._field = field

  def __getattr__(self, name):
    return getattr(self._client, name)

  def open_state(self, request, address):
    return _Lying(self._client.open_state(request, address), self._field)


class _Lying:
  def __init__(self, call, field):
    self._call = call
    self._field = field

  def __iter__(self):
    first, *rest = self._call
    first.header.ClearField(self._field)
    yield from (first, *rest)

  def cancel(self):
    self._call.cancel()


@pytest.mark.parametrize("field", ["donor_id", "clock"])
def test_a_header_that_lies_makes_its_state_garbage(tmp_path, field):
  with served_run(settings(quorum=1), tmp_path) as run:
    donor = donor_and(run)
    joiner = LoopLearner(
      run.address,
      "joiner",
      momentum(),
      wrap=lambda client: Lying(client, field),
    )
    with learners(donor):
      wait_for(lambda: min(versions(run)) >= 1)
      with learners(joiner):
        wait_for(lambda: joiner.steps)

  (told,) = recoveries(run)
  assert (told.source, told.donor) == ("fresh", "")
  assert f"peer: StateHeader.{field} is" in told.reason
  assert not joiner.trainer.got


def test_an_empty_chunk_of_a_state_is_no_progress():
  from ddiloco_jax.wire import state as states

  array = np.arange(4, dtype=np.float32)
  state = states.State(donor="d", step=1, clock=(), arrays={"inner/x": array})
  header, *data, trailer = states.parts(state, 8)
  moves = []
  stream = [header, b"", *data, memoryview(b""), b"", trailer]

  back = states.receive(
    iter(stream),
    {"inner/x": ((4,), "float32")},
    states.Asked(donor="d"),
    lambda: moves.append(1),
  )

  assert len(moves) == 1 + len(data)
  np.testing.assert_array_equal(back.arrays["inner/x"], array)


def test_m5_a_fresh_learners_weights_never_become_the_global_ones(tmp_path):
  # [M5] K=1: kill L0, restart it, kill L1 before L0 has fetched anything.
  with served_run(settings(quorum=1, lease_s=2.0), tmp_path) as run:
    old = [
      LoopLearner(run.address, name, momentum(), state_address="")
      for name in ("0", "1")
    ]
    hold = threading.Event()

    class Slow:
      def __init__(self, client):
        self._client = client

      def __getattr__(self, name):
        return getattr(self._client, name)

      def fetch(self, *args):
        hold.wait(20.0)
        return self._client.fetch(*args)

    with learners(*old):
      wait_for(lambda: min(versions(run)) >= 3)
      old[0].kill()
      fresh = LoopLearner(
        run.address, "0", momentum(), wrap=Slow, takeover=True, recover_s=1.0
      )
      fresh.trainer.params = {
        path: np.full(shape, 1e3, np.float32) for path, shape in SHAPES.items()
      }
      with learners(fresh):
        wait_for(lambda: incarnation_of(run, "0") >= 3)
        old[1].kill()
        before = versions(run)
        hold.set()
        wait_for(lambda: min(versions(run)) >= max(before) + 2)
      after = versions(run)

    theta = run.syncer.snapshot()[0].theta
    assert all(a >= b for a, b in zip(after, before))
    for part in theta:
      for array in part.values():
        assert np.all((array > -0.1) & (array < 1.1))
    seen: dict[int, int] = {}
    for line in tape.Reader(run.directory / "tape.jsonl").lines():
      if isinstance(line.event, events.Merged):
        p, n = line.event.fragment, line.event.version.n
        assert n == seen.get(p, 0) + 1
        seen[p] = n


def test_a_jax_learner_goes_on_with_the_bits_of_another(tmp_path):
  import jax

  from ddiloco_jax import config
  from ddiloco_jax.launch import syncing, training
  from ddiloco_jax.models import transformer
  from ddiloco_jax.training import mesh, trainer
  from tests.support import small

  class Recording(trainer.Trainer):
    def __init__(self, cfg):
      model = transformer.make_model(cfg.model)
      super().__init__(model, cfg.train, mesh.make_mesh(cfg.mesh), None)
      self.given, self.got = [], []

    def take_inner(self):
      self.given.append(jax.device_get(super().take_inner()))
      return super().take_inner()

    def put_inner(self, arrays):
      super().put_inner(arrays)
      self.got.append(jax.device_get(super().take_inner()))

  cfg = config.freeze(small.get_config())
  batches = training.batches_of(cfg, cfg.sync.num_shards)
  theta = syncing.init_params(cfg)
  both = [Recording(cfg), Recording(cfg)]
  for model in both:
    model.warm_up(batches(0)(0))
  with served_run(cfg, tmp_path, theta=theta) as run:
    donor = LoopLearner(
      run.address, "donor", both[0], batches, state_address=""
    )
    joiner = LoopLearner(run.address, "joiner", both[1], batches)
    with learners(donor):
      wait_for(lambda: min(versions(run)) >= 1, 60.0)
      with learners(joiner):
        wait_for(lambda: len(joiner.steps) >= 10, 60.0)

    (told,) = recoveries(run)
    assert told.source == "peer", told
  given, got = both[0].given[-1], both[1].got[-1]
  assert given.keys() == got.keys()
  assert any("mu" in path for path in given)
  assert given["inner/moments_age"] > 0
  for path in given:
    assert given[path].dtype == got[path].dtype
    np.testing.assert_array_equal(given[path], got[path])
  # Its moments are warm: no re-warm-up holds its rate down.
  age = int(given["inner/moments_age"])
  assert int(both[1].state.moments_age) >= age + 10


@contextlib.contextmanager
def desk_on_a_port():
  """A desk of two fragments to which no loop comes, and a call to it."""
  desk = peer.Desk("donor")
  desk.open("run-1", 2)
  server = peer.PeerServer("127.0.0.1:0", desk, WireConfig())
  try:
    with grpc.insecure_channel(server.address) as channel:
      yield desk, methods.make_call(channel, "FetchState", methods.PEER)
  finally:
    server.close()


def state_request(**fields):
  clock = [pb.Version(epoch=1, n=1)] * 2
  asked = dict(learner_id="x", run_id="run-1", donor_id="donor", clock=clock)
  return pb.FetchStateRequest(**{**asked, **fields})


class Gone:
  """The context of a call that was over before its handler began."""

  def add_callback(self, callback):
    return False


def test_a_call_that_was_over_at_once_leaves_the_desk_free():
  desk = peer.Desk("donor")
  desk.open("run-1", 2)

  parts = peer._Peer(desk, WireConfig()).FetchState(state_request(), Gone())

  assert not list(parts)
  assert not desk._is_taken


@pytest.mark.parametrize(
  ("fields", "code", "said"),
  [
    ({"run_id": "r" * 100_000}, "FAILED_PRECONDITION", "was asked"),
    ({"donor_id": "\x1b[2J" * 9_000}, "FAILED_PRECONDITION", "was asked"),
    ({"learner_id": "x\nforged " * 999}, "INVALID_ARGUMENT", "learner_id"),
    ({"clock": []}, "INVALID_ARGUMENT", "a list of 0"),
    ({"clock": [pb.Version()] * 70_000}, "INVALID_ARGUMENT", "2 fragments"),
  ],
)
def test_a_donor_refuses_what_is_malformed_by_name(fields, code, said, caplog):
  caplog.set_level(logging.INFO)
  with desk_on_a_port() as (desk, call):
    with pytest.raises(grpc.RpcError) as caught:
      list(call(state_request(**fields), timeout=20.0))

    assert caught.value.code() == grpc.StatusCode[code]
    assert said in caught.value.details()
    assert not desk._is_taken
  assert "gives its state" not in caplog.text
