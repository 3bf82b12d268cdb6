"""The end of a run: causes, flush, exact publications, exit codes."""

import dataclasses

from ddiloco_jax.protocol import events, ledger, machine
from ddiloco_jax.protocol.ending import EXIT_QUORUM_TIMEOUT, end_cause
from ddiloco_jax.protocol.events import Counts
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.protocol.turn import Turn
from tests.protocol.by_hand import FOUR, ONE, Hand, only
from tests.protocol.driver import Learner, Run

SHORT = Rules(num_fragments=4, cycle_steps=8, num_syncer_steps=40)


def four(**more) -> list[Learner]:
  return [Learner(f"L{i}", start_at=0.01 * i, **more) for i in range(4)]


def test_the_end_flushes_once_publishes_exactly_and_is_acknowledged():
  run = Run(SHORT, four()).run(1000)

  assert run.finished is not None
  assert (run.finished.exit_code, run.finished.missing) == (0, ())
  assert "t has reached 40" in run.finished.reason
  ending = next(
    i for i, e in enumerate(run.effects) if isinstance(e, events.Ending)
  )
  after = run.effects[ending:]
  exact = [e for e in after if isinstance(e, events.Publish) and e.exact]
  assert [e.fragment for e in exact] == [0, 1, 2, 3]
  for publish in exact:
    newest = run.state.fragments[publish.fragment].version
    assert publish.version == newest
    assert len(publish.receivers) == 4
  for learner in run.learners.values():
    assert learner.bases == [f.version for f in run.state.fragments]
  flushed = [e.fragment for e in after if isinstance(e, events.Merge)]
  assert all(flushed.count(p) <= 2 for p in range(4))
  assert {0, 1, 2, 3} >= set(flushed)


def test_no_step_is_pending_once_the_run_has_finished():
  run = Run(SHORT, four()).run(1000)

  for name in run.state.learners:
    for account in run.state.accounts[name]:
      assert not account.spans
      lost = sum(c.steps for _, c in account.discarded)
      assert account.reported.steps == account.merged.steps + lost


def test_a_learner_that_does_not_acknowledge_is_listed_as_missing():
  run = Run(SHORT, four())
  run.run(stop=lambda r: bool(r.of(events.Ending)))

  run.kill("L2", silent=True)
  run.run(1000)

  assert run.finished is not None
  assert run.finished.missing == ("L2",)
  assert run.finished.exit_code == 0


def test_a_finished_run_rejects_whoever_joins():
  run = Run(SHORT, four()).run(1000)

  run.tell(events.Joined(learner="L9", nonce="n"))

  reject = run.of(events.Reject)[-1]
  assert reject.code == "FAILED_PRECONDITION"
  assert "has finished" in reject.reason
  assert machine.next_timer(run.state) is None


def test_a_process_that_comes_back_after_the_end_is_told_of_it():
  hand = Hand(ONE)
  hand.join("ada")
  hand.tell(events.Disconnected(**hand.where("ada")))
  hand.tell(events.StopRequested(reason="enough"))
  assert hand.state.end.finished

  told = hand.join("ada")

  assert [type(effect) for effect in told] == [
    events.Welcome,
    events.Ending,
    events.Finished,
  ]
  assert told[-1].reason == hand.of(events.Finished)[0].reason


def test_merged_tokens_end_the_run():
  rules = dataclasses.replace(SHORT, num_syncer_steps=0, num_tokens=5000)

  run = Run(rules, four()).run(1000)

  assert run.finished is not None
  assert run.finished.exit_code == 0
  assert "tokens are merged" in run.finished.reason
  tokens = [f.merged.tokens for f in run.state.fragments]
  assert sum(tokens) / 4 >= 5000


def test_learners_with_a_finite_budget_end_the_run_in_seconds():
  rules = dataclasses.replace(SHORT, num_syncer_steps=10**6)
  run = Run(rules, four(num_batches=20)).run(1000)

  assert run.finished is not None
  assert "input_exhausted" in run.finished.reason
  assert run.finished.exit_code == 0
  assert run.now < 30
  for name in run.state.learners:
    for account in run.state.accounts[name]:
      assert account.reported.steps == 20


def test_one_exhausted_learner_stays_a_member_while_others_go_on():
  rules = dataclasses.replace(SHORT, num_syncer_steps=60)
  learners = [Learner("L0"), Learner("L1", num_batches=10, start_at=0.1)]

  run = Run(rules, learners).run(40)

  assert run.finished is None
  assert run.state.learners["L1"].training
  assert run.state.num_pacing == 1


def test_below_the_quorum_for_too_long_the_run_ends_with_its_own_code():
  rules = dataclasses.replace(ONE, quorum=3, quorum_timeout_s=60.0)
  hand = Hand(rules)
  hand.tick(1000.0)
  assert machine.next_timer(hand.state) is None
  hand.join("L0")
  hand.join("L1")
  assert "1 more learner: quorum 3, 2 live (L0, L1)" in hand.waiting_for()

  for _ in range(59):
    hand.now += 1.0
    hand.report("L0")
    hand.report("L1")
  assert not hand.of(events.Ending)
  hand.tick(1.1)

  assert "quorum_timeout" in only(hand.of(events.Ending), events.Ending).reason
  for _ in range(100):
    at = machine.next_timer(hand.state)
    if at is None:
      break
    for name in ("L0", "L1"):
      while hand.state.learners[name].asked:
        hand.reply(name)
    if any(r.merging for r in hand.state.rounds):
      hand.merged()
    hand.tick(max(0.0, at - hand.now))
  finished = only(hand.of(events.Finished), events.Finished)
  assert finished.exit_code == EXIT_QUORUM_TIMEOUT


def test_a_request_to_stop_flushes_and_exits_well():
  run = Run(dataclasses.replace(SHORT, num_syncer_steps=0), four()).run(20)

  run.tell(events.StopRequested(reason="SIGTERM"))
  run.run(1000)

  assert run.finished is not None
  assert run.finished.exit_code == 0
  assert "SIGTERM" in run.finished.reason
  assert run.now < 21


def test_who_asks_again_for_the_end_does_not_cut_it_short():
  hand = Hand(FOUR)
  hand.join("L0")
  hand.cycle(["L0"])
  hand.report("L0", 3)
  for _ in range(3):
    hand.tell(events.StopRequested(reason="SIGTERM"))
  flushed = hand.counts["L0"][0]
  hand.reply("L0")
  hand.merged()
  for _ in range(3):
    hand.tell(events.StopRequested(reason="SIGTERM"))
  assert not hand.of(events.Finished)
  hand.apply("L0", exact=True)

  assert only(hand.of(events.Finished), events.Finished).missing == ()
  assert hand.totals("L0").merged == flushed


def test_a_stop_before_anybody_joined_finishes_at_once():
  hand = Hand()

  effects = hand.tell(events.StopRequested(reason="SIGINT"))

  assert only(effects, events.Finished).exit_code == 0


def test_the_flush_is_bounded_and_what_is_left_is_booked():
  hand = Hand(FOUR)
  hand.join("L0")
  hand.cycle(["L0"])
  hand.report("L0", 3)
  hand.tell(events.StopRequested(reason="SIGTERM"))
  assert hand.state.learners["L0"].asked

  for _ in range(20):
    hand.tick(2.0)
    hand.tell(events.Heard(**hand.where("L0")))
  for _ in range(20):
    hand.tick(2.0)

  assert only(hand.of(events.Finished), events.Finished).missing == ("L0",)
  books = dict(hand.totals("L0").discarded)
  assert sum(c.steps for c in books.values()) == 4
  assert set(books) <= {ledger.END, ledger.LOST}


def test_a_carried_reply_that_comes_after_the_flush_is_late():
  hand = Hand(dataclasses.replace(FOUR, flush_s=2.0))
  names = ("L0", "L1")
  for name in names:
    hand.join(name)
  for _ in range(24):
    hand.cycle(names)
  hand.until_asked(names)
  slow, counts = hand.pull("L1"), hand.counts["L1"][0]
  hand.push("L1", 1, slow)
  hand.reply("L0")
  hand.tick(1.0)
  hand.merged()
  hand.tell(events.StopRequested(reason="SIGTERM"))
  hand.tick(2.1)
  assert all(e.exact for e in hand.of(events.Publish)[-1:])

  late = only(hand.reply("L1", slow, counts=counts), events.Resolved)
  for name in names:
    hand.apply(name, exact=True)

  assert late.outcome is events.Outcome.LATE
  assert only(hand.of(events.Finished), events.Finished).missing == ()
  for row in hand.state.accounts.values():
    assert not row[0].spans
  assert dict(hand.totals("L1").discarded)[ledger.LATE] == counts


def test_only_an_exact_adoption_acknowledges_the_end():
  # L1 adopts the last version as any other, and has not heard of the end: it
  # goes on training from it.
  hand = Hand(dataclasses.replace(FOUR, flush_s=2.0))
  names = ("L0", "L1")
  for name in names:
    hand.join(name)
  for _ in range(8):
    hand.cycle(names)
  hand.tell(events.StopRequested(reason="SIGTERM"))
  hand.tick(2.1)
  hand.apply("L1")
  hand.apply("L0", exact=True)
  assert not hand.of(events.Finished)

  hand.apply("L1", exact=True)

  assert only(hand.of(events.Finished), events.Finished).missing == ()


def test_a_restored_run_goes_on_unless_its_end_is_still_reached():
  run = Run(SHORT, four()).run(1000)
  saved = machine.save(run.state)

  same = machine.restore(SHORT, saved)
  longer = machine.restore(
    dataclasses.replace(SHORT, num_syncer_steps=80), saved
  )

  assert same.end is not None
  assert same.end.finished
  assert longer.end is None
  assert longer.epoch == 2
  assert longer.t == 40


def test_no_more_tokens_are_said_to_be_merged_than_are():
  # A mean over the fragments: 3.5. With num_tokens=4 the run would go on.
  state = machine.initial(Rules(num_fragments=2, cycle_steps=2, num_tokens=3))
  counts = (Counts(1, 3), Counts(1, 4))
  fragments = [f._replace(merged=c) for f, c in zip(state.fragments, counts)]

  cause = end_cause(Turn(state._replace(fragments=tuple(fragments))))

  assert cause == ("num_tokens", "3 tokens are merged and num_tokens is 3")
