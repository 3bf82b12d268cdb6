"""Guards: what is not finite, what is an outlier, and that none stops a run."""

import dataclasses
import math

import pytest

from ddiloco_jax.protocol import events, quorum
from ddiloco_jax.protocol.events import Outcome
from ddiloco_jax.protocol.rules import Rules
from tests.protocol.by_hand import Hand, all_of, only

NAMES = ("L0", "L1", "L2", "L3")
ALL = Rules(num_fragments=1, cycle_steps=4, quorum=4)


def asked(rules: Rules = ALL) -> Hand:
  hand = Hand(rules)
  for name in NAMES:
    hand.join(name)
  hand.until_asked(NAMES)
  return hand


def merge_all(hand: Hand, norms: dict[str, float], **more) -> list:
  effects = []
  for name in NAMES:
    effects += hand.reply(name, norm=norms.get(name, 1.0), **more)
  return effects


def go_on(hand: Hand) -> None:
  hand.merged()
  for name in NAMES:
    hand.apply(name)
  hand.until_asked(NAMES)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_delta_that_is_not_finite_is_refused_and_told(norm):
  hand = asked(dataclasses.replace(ALL, quorum=3))

  resolved = only(hand.reply("L0", norm=norm), events.Resolved)
  for name in NAMES[1:]:
    hand.reply(name)
  receivers = only(hand.merged(), events.Publish).receivers

  assert resolved.outcome is Outcome.REFUSED
  assert "not finite" in resolved.reason
  assert hand.state.counters["refused/not_finite"] == 1
  outcomes = {r.learner: r.outcome for r in receivers}
  assert outcomes["L0"] is Outcome.REFUSED
  assert outcomes["L1"] is Outcome.INCLUDED


def test_a_hostile_first_reply_is_judged_against_the_others_of_its_round():
  hand = asked(dataclasses.replace(ALL, quorum=3))

  effects = merge_all(hand, {"L0": 1e30})

  merge = only(effects, events.Merge)
  assert [i.key.learner for i in merge.inputs] == ["L1", "L2", "L3"]
  freed = only(effects, events.Free)
  assert freed.key.learner == "L0"
  assert "outlier" in freed.reason
  hand.merged()
  assert max(hand.state.fragments[0].scales_per_lr) == 1.0


def test_after_eight_accepted_replies_the_running_median_judges_at_once():
  hand = asked(dataclasses.replace(ALL, quorum=3))
  for _ in range(3):
    merge_all(hand, {})
    go_on(hand)
  assert len(hand.state.fragments[0].scales_per_lr) >= quorum.MIN_ACCEPTED

  resolved = only(hand.reply("L0", norm=11.0), events.Resolved)

  assert resolved.outcome is Outcome.REFUSED
  assert "outlier" in resolved.reason
  assert only(hand.reply("L1", norm=9.0), events.Resolved).outcome is (
    Outcome.ACCEPTED
  )


def test_a_round_that_an_outlier_leaves_below_the_quorum_is_not_merged():
  hand = asked()

  effects = merge_all(hand, {"L3": 1e6})

  assert not all_of(effects, events.Merge)
  hand.tick(ALL.min_deadline_s)
  assert hand.of(events.GiveUp)


@pytest.mark.parametrize("known", [False, True])
def test_two_honest_learners_that_differ_do_not_stop_the_run(known):
  # Norms of 1 to 20, at K = 2: the larger one is no fault, whatever the median.
  hand = Hand(dataclasses.replace(ALL, quorum=2))
  names = ("L0", "L1")
  for name in names:
    hand.join(name)
  merges = 0
  for i in range(40):
    hand.until_asked(names)
    ratio = 20.0 if i >= 5 or not known else 1.0
    hand.reply("L0", norm=1.0)
    hand.reply("L1", norm=ratio)
    if any(r.merging for r in hand.state.rounds):
      merges += ratio > 1
      hand.merged()
      for name in names:
        hand.apply(name)
    else:
      hand.tick(ALL.min_deadline_s)

  assert merges >= 10
  # Said, and not silently repeated: the larger one is beyond a median of ones.
  assert {a.kind for a in hand.of(events.Alarm)} == {"outliers_starve"}


def test_refusing_everybody_is_an_alarm_and_seeds_the_median_anew():
  hand = asked()
  for _ in range(2):
    merge_all(hand, {})
    go_on(hand)

  effects = merge_all(hand, dict.fromkeys(NAMES, 50.0))
  assert not all_of(effects, events.Merge)
  alarm = only(hand.of(events.Alarm), events.Alarm)
  assert alarm.kind == "all_refused"
  assert "all 4 replies" in alarm.reason
  hand.until_asked(NAMES)
  effects = merge_all(hand, dict.fromkeys(NAMES, 50.0))

  assert len(only(effects, events.Merge).inputs) == 4


def test_all_not_finite_is_an_alarm_and_no_loop():
  hand = asked()

  merge_all(hand, dict.fromkeys(NAMES, math.nan))

  assert len(hand.of(events.Alarm)) == 1
  num_pulls = len(hand.of(events.Pull))
  hand.tick(0.1)
  assert len(hand.of(events.Pull)) == num_pulls


@pytest.mark.parametrize("inner", ["adam", "random_walk"])
def test_a_warm_up_of_thirteen_times_refuses_no_honest_reply(inner):
  """First merges after few steps at a tiny rate, later ones after many (N16)."""
  hand = asked()
  rate, merges = 1.0, 0
  while rate < 13.0:
    for name in NAMES:
      steps = hand.counts[name][0].steps
      lr_sum = rate * steps
      norm = lr_sum if inner == "adam" else rate * math.sqrt(steps)
      hand.reply(name, norm=norm, lr_sum=lr_sum)
    go_on(hand)
    rate *= 1.3
    merges += 1

  assert merges > 5
  assert not any(name.startswith("refused") for name in hand.state.counters)


def test_without_a_learning_rate_the_norm_is_judged_per_step():
  hand = asked(dataclasses.replace(ALL, quorum=3))

  effects = merge_all(hand, {"L2": 1e9}, lr_sum=0.0)

  assert "norm per step" in only(effects, events.Free).reason


@pytest.mark.parametrize("lr_sum", [0.0, 1e36])
@pytest.mark.parametrize("num_rounds", [0, 3])
def test_no_word_of_its_learning_rate_makes_a_norm_of_1e30_fit(
  lr_sum, num_rounds
):
  # The others tell theirs, and have a median of norms per learning rate.
  hand = asked(dataclasses.replace(ALL, quorum=3))
  for _ in range(num_rounds):
    merge_all(hand, {})
    go_on(hand)

  hand.reply("L0", norm=1e30, lr_sum=lr_sum)
  merged = [x for name in NAMES[1:] for x in hand.reply(name)]

  merge = only(merged, events.Merge)
  assert {i.key.learner for i in merge.inputs} == {*NAMES[1:]}
  assert hand.state.counters["refused/outlier"] == 1
