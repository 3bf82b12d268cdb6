"""A restart steps through what the tape has after the last commit."""

import dataclasses

import pytest

from ddiloco_jax.protocol import events, machine, tape
from ddiloco_jax.protocol.tail import catch_up
from tests.protocol.by_hand import ONE, Hand


class TapedHand(Hand):
  """Writes a tape, and keeps the state before each merge was booked."""

  def __init__(self, path, state=None):
    super().__init__(ONE, state)
    self.commits = []
    self.tape = tape.TapeWriter(path, tape.header(self.state))

  def tell(self, event):
    before = self.state
    event = dataclasses.replace(event, time=self.now)
    if isinstance(event, events.Merged):
      self.commits.append((before, event))
    effects = super().tell(event)
    self.tape.append(event, tuple(effects), self.state)
    return effects


@pytest.fixture
def path(tmp_path):
  return tmp_path / "tape.jsonl"


@pytest.fixture
def hand(path):
  """Two merges, each adopted, and steps after."""
  hand = TapedHand(path)
  hand.join("ada")
  for _ in range(2):
    hand.cycle(["ada"])
  hand.now += 1.0
  hand.report("ada")
  assert len(hand.commits) == 2
  hand.tape.abandon()
  return hand


def test_what_was_said_after_the_last_commit_is_in_the_books(hand, path):
  found = catch_up(path, *hand.commits[-1])

  assert machine.digest(found.state) == machine.digest(hand.state)
  assert found.merged is None


def test_a_merge_that_was_not_made_durable_ends_it(hand, path):
  found = catch_up(path, *hand.commits[0])

  before, _ = hand.commits[1]
  assert machine.digest(found.state) == machine.digest(before)


def test_a_commit_that_the_tape_does_not_have_is_still_to_be_booked(hand, path):
  state, merged = hand.commits[-1]
  lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b"".join(lines[: 1 + state.num_events]) + lines[-1][:9])

  found = catch_up(path, state, merged)

  assert found == (state, merged)


def test_an_epoch_that_committed_nothing_is_in_the_books(hand, path, tmp_path):
  state, merged = hand.commits[-1]
  path.rename(tmp_path / "tape.1.jsonl")
  at_restart = machine.restore(ONE, machine.save(hand.state), 2)
  second = TapedHand(path, at_restart)
  second.now += 1.0
  second.join("bob")
  second.tape.abandon()

  found = catch_up(path, state, merged)

  assert machine.digest(found.state) == machine.digest(second.state)
  assert found.merged is None


@pytest.mark.parametrize("damage", ["no tape", "header", "digest"])
def test_a_damaged_end_is_left_out(hand, path, damage, caplog):
  state, merged = hand.commits[-1]
  text = path.read_text()
  if damage == "no tape":
    path.unlink()
  elif damage == "header":
    path.write_text("{" + text)
  else:
    lines = text.splitlines(keepends=True)
    at = 1 + state.num_events
    lines[at] = lines[at].replace('"digest":"', '"digest":"0')
    path.write_text("".join(lines))

  found = catch_up(path, state, merged)

  assert found == (state, merged)
  assert bool(caplog.records) == (damage != "no tape")
