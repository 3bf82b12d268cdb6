"""The status: four figures, the books, and what the run waits for."""

import dataclasses

import pytest

from ddiloco_jax.protocol import events, status
from ddiloco_jax.protocol.events import Outcome
from ddiloco_jax.protocol.rules import Rules
from tests.protocol.by_hand import FOUR, ONE, Hand, only
from tests.protocol.driver import Learner, Run


def test_a_missing_quorum_names_who_is_there():
  hand = Hand(dataclasses.replace(ONE, quorum=3))
  assert hand.waiting_for() == "waits for 3 more learners: quorum 3, 0 live"
  hand.join("L0")
  hand.join("L1")

  found = status.status(hand.state, hand.now)

  assert found.waiting_for == (
    "waits for 1 more learner: quorum 3, 2 live (L0, L1)"
  )
  assert found.phase == "waiting"


def test_learners_that_compile_are_named():
  hand = Hand(dataclasses.replace(ONE, quorum=2))
  hand.join("L0")
  hand.join("L1")
  hand.report("L0")

  assert "no new step of L1" in hand.waiting_for()
  notes = {
    m.learner: m.note for m in status.status(hand.state, hand.now).learners
  }
  assert notes["L1"] == "it has not reported a step yet"


def test_a_round_names_the_members_that_it_waits_for():
  hand = Hand(dataclasses.replace(ONE, quorum=2))
  for name in ("L0", "L1"):
    hand.join(name)
  for name in ("L0", "L1"):
    hand.report(name)
  hand.reply("L0")

  text = hand.waiting_for()

  assert "waits for 1 more reply: quorum 2, 1 of 2 members replied" in text
  assert "missing L1" in text
  found = status.status(hand.state, hand.now).rounds[0]
  assert (found.num_members, found.num_replies) == (2, 1)
  assert found.phase == "collecting"


def test_live_training_eligible_and_contributing_are_four_figures():
  hand = Hand(dataclasses.replace(FOUR, quorum=1))
  for name in ("L0", "L1", "L2", "L3"):
    hand.join(name)
  for _ in range(12):
    hand.cycle(["L0", "L1", "L2"])
  hand.tell(events.Disconnected(**hand.where("L2")))
  for _ in range(8):
    hand.cycle(["L0", "L1"])
  hand.tell(events.Heard(**hand.where("L3")))
  hand.cycle(["L0", "L1"])

  found = status.status(hand.state, hand.now)

  assert found.num_live == 4
  assert found.num_training == 3
  assert found.num_eligible == 2
  assert found.num_contributing == 2
  assert {m.learner for m in found.learners if m.contributing} == {"L0", "L1"}


def test_books_are_means_over_fragments_weighted_by_parameters():
  rules = Rules(
    num_fragments=2,
    cycle_steps=4,
    fragment_params=(300, 100),
    num_syncer_steps=30,
  )
  run = Run(rules, [Learner("L0"), Learner("L1", start_at=0.2)]).run(17)

  books = {b.name: b.tokens for b in status.books(run.state)}
  by_hand = {"reported": 0.0, "merged": 0.0, "pending": 0.0}
  for name in run.state.learners:
    for p, share in ((0, 0.75), (1, 0.25)):
      totals = status.account_totals(run.state, name, p)
      by_hand["reported"] += share * totals.reported.tokens
      by_hand["merged"] += share * totals.merged.tokens
      by_hand["pending"] += share * totals.pending.tokens

  for name, tokens in by_hand.items():
    assert books[name] == pytest.approx(tokens)
  lost = sum(t for name, t in books.items() if name.startswith("discarded/"))
  assert books["reported"] == pytest.approx(
    books["merged"] + books["pending"] + lost
  )


def test_a_link_too_slow_is_named_as_the_cause():
  hand = Hand(dataclasses.replace(FOUR, max_staleness=0))
  hand.join("L0")
  hand.join("L1")
  for _ in range(12):
    hand.cycle(["L0"])
  hand.until_asked(["L0", "L1"])

  resolved = only(hand.reply("L1"), events.Resolved)

  assert resolved.outcome is Outcome.REFUSED
  found = status.status(hand.state, hand.now)
  note = next(m.note for m in found.learners if m.learner == "L1")
  assert "its link is too slow" in note


def test_the_eta_is_the_steps_that_are_left_at_the_pace():
  rules = Rules(num_fragments=2, cycle_steps=4, num_syncer_steps=100)

  run = Run(rules, [Learner("L0", step_s=2.0)]).run(100.5)

  found = status.status(run.state, run.now)
  assert found.t == run.state.t
  assert found.eta_s == pytest.approx((100 - found.t) * 2.0)
  assert found.phase == "training"


def test_a_finished_run_waits_for_nothing():
  rules = Rules(num_fragments=2, cycle_steps=4, num_syncer_steps=10)
  run = Run(rules, [Learner("L0")]).run(1000)

  found = status.status(run.state, run.now)

  assert found.phase == "finished"
  assert found.waiting_for.startswith("nothing: the run has finished")
