"""An admin drains a run and evicts learners, over gRPC."""

import dataclasses
import json

import pytest

from ddiloco_jax.cli import admin
from ddiloco_jax.launch import exits
from ddiloco_jax.learner.client import Client
from ddiloco_jax.protocol import check, events
from ddiloco_jax.wire import port
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError
from tests.protocol.by_hand import ONE, Hand
from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.served import wait_for


def test_a_drained_run_ends_as_on_a_signal(tmp_path, capsys):
  with served_run(settings(quorum=1), tmp_path / "run") as run:
    ada = LoopLearner(run.address, "ada", paced(0.02))
    with learners(ada):
      wait_for(lambda: sum(f.version.n for f in run.status().fragments) >= 2)

      code = admin.main([run.address, "drain", "--reason=maintenance"])

      assert code == exits.OK
      finished = run.wait()
      assert "drained by an admin: maintenance" in ada.end()
  assert finished.exit_code == exits.OK
  assert finished.missing == ()
  assert run.address in capsys.readouterr().out


def test_an_address_that_is_none_is_refused_by_name(capsys):
  with pytest.raises(SystemExit) as caught:
    admin.main(["localhost", "drain"])

  assert caught.value.code == exits.BAD_USAGE
  assert "Address 'localhost': it must be HOST:PORT" in capsys.readouterr().err


def test_an_evicted_process_is_fenced_and_its_id_is_free(tmp_path, capsys):
  with served_run(settings(quorum=1), tmp_path / "run") as run:
    ada = LoopLearner(run.address, "ada", paced(0.02))
    bob = LoopLearner(run.address, "bob", paced(0.02))
    with learners(ada, bob):
      wait_for(lambda: ada.steps and bob.steps)

      flags = ["evict", "bob", "--reason=its host is sick", "--json"]
      assert admin.main([run.address, *flags]) == exits.OK

      bob.join(20.0)
      assert isinstance(bob.error, ServiceError)
      assert bob.error.code == "ABORTED"
      assert "evicted" in bob.error.text
      told = json.loads(capsys.readouterr().out)
      again = LoopLearner(run.address, "bob", paced(0.02))
      with learners(again):
        wait_for(lambda: again.steps)
        assert again.link.welcome.session.incarnation > told["incarnation"]
      assert ada.error is None


def test_whoever_is_not_here_is_not_evicted(tmp_path, capsys):
  with served_run(settings(quorum=1), tmp_path / "run") as run:
    ada = LoopLearner(run.address, "ada", paced(0.02))
    with learners(ada):
      wait_for(lambda: ada.steps)

      assert admin.main([run.address, "evict", "bob"]) == exits.FAILED

  error = capsys.readouterr().err
  assert "'bob'" in error
  assert "name one of ada" in error


def test_what_can_have_no_effect_after_the_end_is_refused_by_name(
  tmp_path, capsys
):
  with served_run(settings(quorum=1), tmp_path / "run") as run:
    ada = LoopLearner(run.address, "ada", paced(0.02))
    with learners(ada):
      wait_for(lambda: ada.steps)
      admin.main([run.address, "drain"])
      run.wait()

      codes = {
        words: admin.main([run.address, *words])
        for words in [("evict", "ada"), ("evict", "bob"), ("snapshot",)]
      }
      said = capsys.readouterr().err.splitlines()
      again = admin.main([run.address, "drain"])  # As documented: just so.

  assert set(codes.values()) == {exits.FAILED}
  for name, line in zip(("'ada'", "'bob'"), said):
    assert f"learner {name} is to be evicted" in line
    assert "the run has finished (stop_requested: drained by an admin" in line
    assert "nobody is in it" in line
  assert "the run ends (stop_requested" in said[2]
  assert again == exits.OK


@pytest.mark.parametrize("address", ["", "127.0.0.1:9"])
def test_no_syncer_there_has_its_own_code(address, capsys):
  code = None
  try:
    code = admin.main([address, "drain", "--timeout_s=1"])
  except SystemExit as exit_:
    code = exit_.code

  assert code == (exits.NO_SYNCER if address else exits.BAD_USAGE)
  assert capsys.readouterr().err


def test_an_evicted_process_does_not_join_again():
  hand = Hand()
  hand.join("ada")
  hand.report("ada")
  hand.tell(events.EvictRequested(learner="ada", reason="it lies"))

  (reject,) = hand.tell(events.Joined(learner="ada", nonce="ada-0"))

  assert reject.code == "ABORTED"
  assert hand.state.counters["evicted"] == 1
  assert [type(e) for e in hand.join("ada", nonce="other")] == [events.Welcome]


def test_an_evicted_process_gets_nothing_more(tmp_path):
  with served_run(settings(quorum=1), tmp_path / "run") as run:
    ada = LoopLearner(run.address, "ada", paced(0.02), state_address="")
    with learners(ada):
      wait_for(lambda: sum(f.version.n for f in run.status().fragments) >= 2)
      bob = Client(run.address, learner="bob")
      control = bob.join(
        port.Hello(
          learner="bob", nonce="n", layout_digest=bob.get_run().layout.digest()
        )
      )
      _, welcome = next(iter(control.notices()))
      session = welcome.session
      request = pb.FetchStateRequest(
        learner_id="bob",
        incarnation=session.incarnation,
        session_secret=session.secret,
        run_id=welcome.run_id,
        donor_id="ada",
        clock=[pb.Version(epoch=1)] * 2,
      )
      bob.fetch(session, 0, 0, False)
      assert list(bob.open_state(request, ""))

      run.syncer.evict("bob", "it lies")

      with pytest.raises(ServiceError, match="it said goodbye or was fenced"):
        bob.fetch(session, 0, 0, False)
      with pytest.raises(ServiceError, match="it said goodbye or was fenced"):
        list(bob.open_state(request, ""))
      bob.close()


def test_a_process_that_starts_over_is_evicted_between_its_two_lives(tmp_path):
  with served_run(settings(quorum=1), tmp_path / "run") as run:
    ada = LoopLearner(run.address, "ada", paced(0.02))
    bob = LoopLearner(run.address, "bob", paced(0.02))
    with learners(ada, bob):
      wait_for(lambda: ada.steps and bob.steps)
      bob.link.start_over("its loss rose")  # As the loop does it.
      wait_for(lambda: run.syncer._state.learners["bob"].gone)

      run.syncer.evict("bob", "it lies")

      bob.join(20.0)
      assert isinstance(bob.error, ServiceError)
      assert bob.error.code == "ABORTED"
      assert ada.error is None


def test_the_many_that_could_be_evicted_are_not_all_named():
  hand = Hand(dataclasses.replace(ONE, max_learners=300, num_shards=300))
  for k in range(300):
    hand.join(f"learner-{k:03}" + "x" * 50)

  with pytest.raises(ValueError, match="and 292 more") as caught:
    check.check(hand.state, events.EvictRequested(learner="b", reason=""))

  assert len(str(caught.value)) < 1000


def test_no_evicted_process_is_forgotten_for_those_after_it():
  hand = Hand()
  for k in range(20):
    hand.join("ada", nonce=f"n{k}", takeover=True)
    hand.tell(events.EvictRequested(learner="ada", reason="it lies"))

  (reject,) = hand.tell(events.Joined(learner="ada", nonce="n0", takeover=True))

  assert reject.code == "ABORTED"


def test_a_process_whose_shard_was_taken_is_evicted_too():
  hand = Hand(dataclasses.replace(ONE, num_shards=1, max_learners=1))
  hand.join("ada")
  hand.report("ada")
  hand.tick(20.0)
  hand.join("bob")  # Takes the only shard; ada may come back.
  event = events.EvictRequested(learner="ada", reason="it lies")
  check.check(hand.state, event)
  hand.tell(event)
  hand.tick(20.0)

  (reject,) = hand.tell(events.Joined(learner="ada", nonce="ada-0"))

  assert reject.code == "ABORTED"
  assert hand.totals("ada").pending.tokens == 0
  with pytest.raises(ValueError, match="name one of bob"):
    check.check(hand.state, event)
