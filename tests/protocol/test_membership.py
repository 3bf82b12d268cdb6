"""Who takes part: leases, incarnations, shards."""

import dataclasses

from ddiloco_jax.protocol import events, machine, membership
from ddiloco_jax.protocol.events import Outcome, Position, Version
from tests.protocol.by_hand import ONE, Hand, all_of, only


def test_the_first_learner_is_welcomed_with_shard_0_and_version_0():
  hand = Hand()

  welcome = only(hand.join("L0"), events.Welcome)

  assert welcome.incarnation == 1
  assert not welcome.reconnect
  assert welcome.clocks == (events.FragmentClock(Version(1, 0), 0),)
  assert welcome.positions == (Position(0, 0),)


def test_the_same_nonce_is_a_reconnect_that_keeps_the_incarnation():
  hand = Hand()
  hand.join("L0")
  hand.report("L0")
  pull = hand.pull("L0")
  hand.tell(events.Disconnected(**hand.where("L0")))

  effects = hand.join("L0")

  welcome = only(effects, events.Welcome)
  assert welcome.reconnect
  assert welcome.incarnation == 1
  again = only(effects, events.Pull)
  assert (again.round, again.attempt) == (pull.round, pull.attempt)


def test_a_live_id_with_an_open_stream_refuses_another_process():
  hand = Hand()
  hand.join("L0")

  reject = only(hand.join("L0", "other"), events.Reject)

  assert reject.code == "FAILED_PRECONDITION"
  assert "--takeover" in reject.reason


def test_takeover_fences_the_live_process():
  hand = Hand()
  hand.join("L0")

  effects = hand.join("L0", "other", takeover=True)

  assert only(effects, events.Fence).incarnation == 1
  assert only(effects, events.Welcome).incarnation == 2


def test_an_ended_stream_admits_a_new_process_at_once():
  hand = Hand()
  hand.join("L0")
  hand.tell(events.Disconnected(**hand.where("L0")))

  effects = hand.join("L0", "other")

  assert only(effects, events.Fence).incarnation == 1
  assert only(effects, events.Welcome).positions == (Position(0, 0),)


def test_a_fenced_process_does_not_join_again():
  hand = Hand()
  hand.join("L0", "first")
  hand.join("L0", "second", takeover=True)

  reject = only(hand.join("L0", "first", takeover=True), events.Reject)

  assert reject.code == "ABORTED"
  assert hand.state.learners["L0"].incarnation == 2


def test_an_evicted_process_does_not_join_again_whoever_came_after_it():
  hand = Hand()
  hand.join("L0", "evicted")
  hand.tell(events.EvictRequested(learner="L0", reason="a sick host"))
  for i in range(membership.MAX_FENCED + 6):
    hand.join("L0", f"later-{i}", takeover=True)

  reject = only(hand.join("L0", "evicted", takeover=True), events.Reject)

  assert reject.code == "ABORTED"
  assert "evicted" in reject.reason
  known = hand.state.learners["L0"]
  assert len(known.fenced_nonces) <= membership.MAX_FENCED


def test_answers_of_an_old_incarnation_are_refused_and_change_nothing():
  hand = Hand()
  hand.join("L0", "first")
  hand.report("L0")
  pull = hand.pull("L0")
  hand.join("L0", "second", takeover=True)
  before = hand.state

  resolved = only(hand.reply("L0", pull), events.Resolved)

  assert resolved.outcome is Outcome.REFUSED
  assert "incarnation 1" in resolved.reason
  assert hand.state.accounts == before.accounts
  assert hand.state.rounds == before.rounds


def test_a_killed_learner_ages_out_and_new_ones_make_the_quorum():
  rules = dataclasses.replace(ONE, quorum=2)
  hand = Hand(rules)
  hand.join("L0")
  hand.join("L1")
  hand.cycle(["L0", "L1"])
  hand.tell(events.Disconnected(**hand.where("L1")))

  hand.tick(rules.lease_s / 2)
  hand.tell(events.Heard(**hand.where("L0")))
  hand.tick(rules.lease_s / 2 + 0.1)

  assert hand.state.num_live == 1
  hand.tell(events.Left(**hand.where("L0")))
  for name in ("L8", "L9"):
    hand.join(name)
  hand.cycle(["L8", "L9"])
  hand.cycle(["L8", "L9"])
  assert {m.learner for m in hand.state.fragments[0].contributors} == {
    "L8",
    "L9",
  }


def test_any_byte_keeps_a_learner_live_and_silence_ends_it():
  hand = Hand()
  hand.join("L0")
  for _ in range(10):
    hand.tick(10.0)
    hand.tell(events.Heard(**hand.where("L0")))
  assert hand.state.learners["L0"].live

  hand.tick(ONE.lease_s)

  assert not hand.state.learners["L0"].live
  hand.tell(events.Heard(**hand.where("L0")))
  assert hand.state.learners["L0"].live


def test_chunks_of_an_upload_are_signs_of_life():
  hand = Hand(dataclasses.replace(ONE, lease_s=5.0))
  hand.join("L0")
  hand.report("L0")

  for num_bytes in range(60):
    hand.tick(1.0)
    hand.push("L0", num_bytes)

  assert hand.state.learners["L0"].live
  assert not hand.of(events.GiveUp)


def test_a_learner_without_steps_is_live_and_not_training():
  hand = Hand(dataclasses.replace(ONE, quorum_timeout_s=1e6))
  hand.join("L0")
  hand.report("L0")
  assert hand.state.num_training == 1

  for _ in range(7):
    hand.tick(10.0)
    hand.tell(events.Heard(**hand.where("L0")))

  assert (hand.state.num_live, hand.state.num_training) == (1, 0)
  hand.report("L0", 0, waiting=True)
  assert hand.state.num_training == 1


def test_more_than_max_learners_are_rejected():
  hand = Hand(dataclasses.replace(ONE, max_learners=1))
  hand.join("L0")

  reject = only(hand.join("L1"), events.Reject)

  assert reject.code == "RESOURCE_EXHAUSTED"
  assert "max_learners" in reject.reason


def test_no_free_shard_is_an_error_with_the_fix():
  hand = Hand(dataclasses.replace(ONE, num_shards=1))
  hand.join("L0")

  reject = only(hand.join("L1"), events.Reject)

  assert reject.code == "RESOURCE_EXHAUSTED"
  assert "num_shards" in reject.reason


def test_shards_are_disjoint_and_a_lost_one_goes_on_at_its_accepted_position():
  hand = Hand()
  hand.join("L0")
  hand.join("L1")
  hand.report("L0")
  hand.reply("L0", positions=(Position(0, 7),))
  hand.tell(events.Left(**hand.where("L0")))

  taken = only(hand.join("L2"), events.Welcome)
  fresh = only(hand.join("L0", "again"), events.Welcome)

  assert hand.state.learners["L1"].shards == (1,)
  assert taken.positions == (Position(0, 7),)
  assert fresh.positions == (Position(2, 0),)


def test_a_learner_that_returns_gets_its_shard_back():
  hand = Hand()
  for name in ("L0", "L1", "L2"):
    hand.join(name)
  hand.tell(events.Left(**hand.where("L0")))
  hand.tell(events.Left(**hand.where("L2")))

  welcome = only(hand.join("L2", "again"), events.Welcome)

  assert welcome.positions[0].shard == 2


def test_a_silent_learner_keeps_its_shard_while_others_are_free():
  hand = Hand(dataclasses.replace(ONE, num_shards=2))
  hand.join("L0")
  hand.tick(20.0)

  effects = hand.join("L1")

  assert only(effects, events.Welcome).positions[0].shard == 1
  assert all_of(effects, events.Fence) == []


def test_who_takes_over_the_shard_of_a_silent_learner_fences_it():
  hand = Hand(dataclasses.replace(ONE, num_shards=1))
  hand.join("L0")
  hand.tick(20.0)

  effects = hand.join("L1")

  assert only(effects, events.Fence).learner == "L0"
  assert only(effects, events.Welcome).positions[0].shard == 0
  hand.report("L0")
  assert not hand.state.learners["L0"].live


def test_a_version_never_goes_back_in_a_storm_of_restarts():
  hand = Hand()
  hand.join("L0", "0-0")
  hand.join("L1", "1-0")
  seen = [0]
  for n in range(1, 6):
    hand.cycle(["L0", "L1"])
    name = f"L{n % 2}"
    hand.tell(events.Disconnected(**hand.where(name)))
    welcome = only(hand.join(name, f"{n}"), events.Welcome)
    seen.append(welcome.clocks[0].version.n)
    assert hand.state.learners[name].counts[0] == (0, 0)

  assert seen == sorted(seen)
  assert seen[-1] > 0
  merged = [i.key for m in hand.of(events.Merge) for i in m.inputs]
  pulled = [
    (e.learner, e.incarnation, e.fragment, e.round, e.attempt)
    for e in all_of(hand.effects, events.Pull)
  ]
  assert all(tuple(key) in pulled for key in merged)


def test_bases_of_an_older_epoch_stay_valid_up_to_n0():
  hand = Hand()
  hand.join("L0")
  hand.cycle(["L0"])
  saved = machine.save(hand.state)
  hand.cycle(["L0"])
  rolled_back = hand.bases["L0"][0]
  assert rolled_back == Version(1, 2)

  kept = Hand(state=machine.restore(ONE, saved))
  effects = kept.join("L9", bases=(Version(1, 1),))
  welcome = only(effects, events.Welcome)
  assert welcome.clocks[0].version == Version(1, 1)
  assert welcome.clocks[0].n0 == 1
  assert not all_of(effects, events.Publish)
  assert kept.state.learners["L9"].bases[0] == Version(1, 1)

  lost = Hand(state=machine.restore(ONE, saved))
  effects = lost.tell(
    events.Joined(learner="L9", nonce="n", bases=(rolled_back,))
  )
  publish = only(effects, events.Publish)
  assert publish.version == Version(1, 1)
  assert "rolled back" in publish.reason
  # It is known, and nobody asks for what would be refused.
  assert lost.state.learners["L9"].bases[0] == rolled_back
  lost.tell(
    events.Reported(
      learner="L9",
      incarnation=lost.state.learners["L9"].incarnation,
      step=1,
      counts=(events.Counts(1, 100),),
    )
  )
  assert not lost.of(events.Pull)


def test_a_welcome_after_a_restart_names_the_last_merged_reply():
  hand = Hand()
  hand.join("L0")
  hand.cycle(["L0"])
  pull = hand.pull("L0")

  hand = Hand(state=machine.restore(ONE, machine.save(hand.state)))
  welcome = only(hand.join("L0"), events.Welcome)

  assert welcome.reconnect
  clock = welcome.clocks[0]
  assert (clock.merged_n, clock.merged_round, clock.merged_attempt) == (
    1,
    pull.round,
    pull.attempt,
  )
