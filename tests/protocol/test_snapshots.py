"""A consistent cut: between two versions, bounded, and said."""

import pytest

from ddiloco_jax.protocol import events, machine, snapshots
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.protocol.turn import Turn
from tests.protocol.by_hand import Hand, all_of, only

RULES = Rules(num_fragments=1, cycle_steps=4, quorum=1, lease_s=15.0)


def marked(run: Hand) -> events.Marker:
  return only(run.tell(events.SnapshotRequested()), events.Marker)


def done(run: Hand, name: str, saved: bool = True, **more):
  where = run.where(name)
  event = events.MarkerDone(snapshot=1, saved=saved, **where, **more)
  return run.tell(event)


def ready(*names: str) -> Hand:
  run = Hand(RULES)
  for name in names:
    run.join(name)
  return run


def test_a_cut_names_the_clock_and_who_saved():
  run = ready("a", "b")

  marker = marked(run)
  run.tell(events.Captured(snapshot=1))
  done(run, "a")
  done(run, "b", saved=False, reason="disk full")
  over = only(
    run.tell(events.Captured(snapshot=1, path="x")), events.SnapshotOver
  )

  assert [name for name, _ in marker.members] == ["a", "b"]
  assert (over.reason, over.path, over.clock) == ("", "x", marker.clock)
  assert over.learners == ("a",)
  assert over.skipped == ("b: disk full",)
  assert run.state.cut is None


def test_a_silent_learner_is_skipped_by_name_once_the_lease_is_over():
  run = ready("a")
  marked(run)
  run.tell(events.Captured(snapshot=1, path="x"))

  over = only(run.tick(15.1), events.SnapshotOver)

  assert not over.reason
  assert over.skipped == ("a: it left or was lost",)


def test_a_learner_that_is_alive_and_slow_is_skipped_too():
  run = ready("a")
  marked(run)
  run.tell(events.Captured(snapshot=1, path="x"))

  for _ in range(14):
    run.tell(events.Heard(**run.where("a")))
    run.tick(1.0)
  over = only(run.tick(1.0), events.SnapshotOver)

  assert over.skipped == ("a: not done within 15 s",)


def taken(run: Hand, *saved: str) -> events.SnapshotOver:
  """A cut of which these save their part."""
  effects = run.tell(events.SnapshotRequested())
  for name in saved:
    effects += done(run, name)
  return only(
    effects + run.tell(events.Captured(snapshot=1, path="x")),
    events.SnapshotOver,
  )


def test_a_learner_whose_lease_ran_out_before_the_marker_is_named():
  run = ready("a", "b")
  for _ in range(20):
    run.tell(events.Heard(**run.where("a")))
    run.tick(1.0)

  over = taken(run, "a")

  assert over.learners == ("a",)
  assert over.skipped == (
    "b: not live when the markers were sent; last heard of 20 s ago",
  )


def test_a_learner_between_two_processes_is_named():
  run = ready("a", "b")
  run.tell(events.Left(**run.where("b"), reason="loss spike"))
  run.tell(events.Heard(**run.where("a")))
  run.tick(2.0)

  over = taken(run, "a")

  assert over.learners == ("a",)
  assert over.skipped == (
    "b: not live when the markers were sent; last heard of 2 s ago",
  )


def test_who_joins_again_before_the_marker_takes_part():
  run = ready("a", "b")
  run.tell(events.Left(**run.where("b"), reason="loss spike"))
  run.join("b", "b-1")

  over = taken(run, "a", "b")

  assert over.learners == ("a", "b")
  assert over.skipped == ()


def test_who_is_away_at_the_marker_and_comes_back_is_named_once():
  run = ready("a", "b")
  run.tell(events.Left(**run.where("b"), reason="loss spike"))
  marked(run)
  run.join("b", "b-1")

  done(run, "b")
  done(run, "a")
  over = only(
    run.tell(events.Captured(snapshot=1, path="x")), events.SnapshotOver
  )

  assert over.learners == ("a",)
  assert [text.split(":")[0] for text in over.skipped] == ["b"]


@pytest.mark.parametrize("how", ["left", "evicted", "silent, then evicted"])
def test_who_is_gone_for_good_is_not_named(how):
  run = ready("a", "b")
  if how == "left":
    run.tell(events.Left(**run.where("b"), reason="enough"))
  if how != "evicted":
    for _ in range(15):
      run.tell(events.Heard(**run.where("a")))
      run.tick(1.0)
  if how != "left":
    run.tell(events.EvictRequested(learner="b", reason="broken"))

  over = taken(run, "a")

  assert over.learners == ("a",)
  assert over.skipped == ()


def test_a_second_request_joins_the_first():
  run = ready("a")
  marked(run)

  again = run.tell(events.SnapshotRequested())

  assert not all_of(again, events.Marker)
  assert run.state.cut is not None
  assert run.state.cut.snapshot == 1


def test_a_cut_without_the_syncers_part_is_none():
  run = ready("a")
  marked(run)
  done(run, "a")

  over = only(run.tick(165.1), events.SnapshotOver)

  assert "syncer's own part" in over.reason


def test_no_cut_is_taken_of_a_run_that_ends():
  run = ready("a")
  run.tell(events.StopRequested(reason="enough"))

  over = only(run.tell(events.SnapshotRequested()), events.SnapshotOver)

  assert "the run ends" in over.reason


def test_an_end_gives_up_the_cut_under_way():
  run = ready("a")
  marked(run)

  over = only(
    run.tell(events.StopRequested(reason="enough")), events.SnapshotOver
  )

  assert "the run ends" in over.reason
  assert run.state.cut is None


def test_a_restart_in_the_middle_of_a_cut_forgets_it():
  run = ready("a")
  marked(run)

  state = machine.restore(RULES, machine.save(run.state))

  assert state.cut is None
  assert state.next_snapshot == 2


def test_no_round_opens_until_the_syncer_has_copied_its_part():
  run = ready("a")
  run.until_asked(["a"])
  run.reply("a")
  run.tell(events.SnapshotRequested())
  assert run.state.cut is not None

  run.merged()
  markers = run.of(events.Marker)
  for _ in range(12):
    run.report("a")
    run.tick(1.0)

  assert len(markers) == 1
  assert markers[0].clock[0].n == 1
  assert not run.state.rounds

  run.apply("a", 0)
  run.tell(events.Captured(snapshot=1))
  run.until_asked(["a"])

  assert run.state.rounds, "it opens again before any file is written"
  assert run.state.cut is not None


def test_who_saved_something_else_is_not_in_the_cut():
  # Found by exploration: a process whose adoption was never heard.
  run = ready("a", "b")
  run.until_asked(["a", "b"])
  run.reply("a")
  run.reply("b")
  run.merged()
  marked(run)
  run.apply("a")

  done(run, "a")
  done(run, "b")
  run.tell(events.Captured(snapshot=1))
  over = only(
    run.tell(events.Captured(snapshot=1, path="x")), events.SnapshotOver
  )

  assert over.learners == ("a",)
  assert over.skipped == (
    "b: it says that it saved, and not that it holds the cut's clock",
  )


def rolled_back() -> Hand:
  """A restart that has lost the version that "a" trains from."""
  run = ready("a")
  saved = machine.save(run.state)
  while run.state.fragments[0].version.n < 1:
    run.cycle("a")
  again = Hand(RULES, machine.restore(RULES, saved))
  again.incarnations, again.steps = run.incarnations, run.steps
  again.counts, again.bases = run.counts, run.bases
  again.join("a", bases=tuple(run.bases["a"]))
  return again


def test_who_trains_from_a_lost_version_does_not_hold_the_clock():
  run = rolled_back()
  marker = marked(run)
  run.tell(events.Captured(snapshot=1, path="x"))

  assert run.bases["a"][0].n > marker.clock[0].n
  assert snapshots.holds_rounds(Turn(run.state))
  over = only(done(run, "a"), events.SnapshotOver)

  assert over.learners == ()
  assert over.skipped == (
    "a: it says that it saved, and not that it holds the cut's clock",
  )


def test_who_has_adopted_the_newest_after_a_rollback_is_in_the_cut():
  run = rolled_back()
  marked(run)
  run.tell(events.Captured(snapshot=1, path="x"))

  run.apply("a")
  over = only(done(run, "a"), events.SnapshotOver)

  assert over.learners == ("a",)
