"""When a syncer steps down, and when a standby takes over: each by its clock."""

import dataclasses
import json

import pytest

from ddiloco_jax.syncer.errors import Superseded
from ddiloco_jax.syncer.files import OsFiles
from ddiloco_jax.syncer.heartbeat import Beat, Heartbeat, read_beat
from ddiloco_jax.syncer.journal import Journal
from ddiloco_jax.syncer.watch import Watch
from tests.support.served import wait_for
from tests.support.standing_by import HangingFiles

BEAT = Beat(epoch=1, counter=1, lease_s=10.0, address="h:1")


class Clock:
  """Goes when it is told to."""

  def __init__(self):
    self.time = 100.0

  def __call__(self):
    return self.time


def beating(tmp_path, files, clock, lease_s=0.4):
  lost = []
  made = Heartbeat(tmp_path, files, "h:1", lease_s, lost.append, clock)
  made.start(1)
  return made, lost


def write(run_dir, beat):
  (run_dir / "heartbeat.json").write_text(json.dumps(dataclasses.asdict(beat)))


def watching(run_dir, clock):
  journal = Journal(run_dir / "journal", OsFiles())
  watch = Watch(run_dir, journal, 10.0, clock)
  watch.look()
  return watch


def look_for(watch, clock, seconds):
  for _ in range(round(seconds * 2)):
    clock.time += 0.5
    watch.look()


def test_the_counter_moves_until_the_end_is_said(tmp_path):
  made, lost = beating(tmp_path, OsFiles(), Clock())
  first = read_beat(tmp_path).counter
  wait_for(lambda: read_beat(tmp_path).counter >= first + 2)
  made.check()
  made.end("a limit", 4)

  last = read_beat(tmp_path)
  assert (last.ended, last.exit_code) == ("a limit", 4)
  assert not lost
  made.close()


def test_a_renewal_that_hangs_is_noticed_before_it_returns(tmp_path):
  files, clock = HangingFiles(), Clock()
  made, lost = beating(tmp_path, files, clock)
  files.hang()
  wait_for(lambda: files.num_waiting)
  made.check()
  clock.time += 0.21

  with pytest.raises(Superseded, match=r"not renewed for 0\.2 s"):
    made.check()
  wait_for(lambda: lost)
  assert files.num_waiting

  files.go_on()
  wait_for(lambda: not files.num_waiting)
  with pytest.raises(Superseded):
    made.check()
  made.close()


def test_who_was_stopped_too_long_does_not_come_back(tmp_path):
  # Its next renewal would go well: that is no reason to go on.
  clock = Clock()
  made, lost = beating(tmp_path, OsFiles(), clock)
  clock.time += 60.0

  wait_for(lambda: lost)
  with pytest.raises(Superseded):
    made.check()
  assert len(lost) == 1
  made.close()


def test_a_later_epoch_is_noticed_even_where_no_clock_went_on(tmp_path):
  made, lost = beating(tmp_path, OsFiles(), Clock())
  Journal(tmp_path / "journal", OsFiles()).fence(2)

  wait_for(lambda: lost)
  with pytest.raises(Superseded, match="epoch 2 has begun"):
    made.check()
  made.close()


def test_without_a_lease_nothing_is_renewed_or_checked(tmp_path):
  clock = Clock()
  made, lost = beating(tmp_path, OsFiles(), clock, lease_s=0.0)
  clock.time += 1e6

  made.check()
  made.end("a limit", 0)
  assert not (tmp_path / "heartbeat.json").exists()
  assert not lost


def test_it_is_a_standbys_turn_after_a_lease_without_a_move(tmp_path):
  clock = Clock()
  write(tmp_path, BEAT)
  watch = watching(tmp_path, clock)

  look_for(watch, clock, 9.5)
  assert not watch.is_due()
  write(tmp_path, dataclasses.replace(BEAT, counter=2))
  look_for(watch, clock, 10.0)
  assert not watch.is_due()
  assert watch.sentence() == (
    "stands by for h:1 (epoch 1, counter 2): 9.5 s of 10 s without a move of it"
  )
  look_for(watch, clock, 0.5)
  assert watch.is_due()


def test_a_standby_that_was_stopped_itself_has_seen_nothing(tmp_path):
  clock = Clock()
  write(tmp_path, BEAT)
  watch = watching(tmp_path, clock)

  clock.time += 3600.0
  watch.look()
  assert watch.silent_s == 1.0
  assert not watch.is_due()


def test_an_epoch_that_is_taken_is_a_sign_of_life(tmp_path):
  clock = Clock()
  write(tmp_path, BEAT)
  watch = watching(tmp_path, clock)
  look_for(watch, clock, 9.5)
  Journal(tmp_path / "journal", OsFiles()).fence(2)

  look_for(watch, clock, 5.0)
  assert not watch.is_due()
  assert watch.epoch == 2


def test_the_last_word_of_a_syncer_that_was_replaced_is_no_sign(tmp_path):
  clock = Clock()
  write(tmp_path, dataclasses.replace(BEAT, epoch=2))
  watch = watching(tmp_path, clock)
  for counter in range(5):
    write(tmp_path, dataclasses.replace(BEAT, counter=100 + counter))
    look_for(watch, clock, 2.0)

  assert watch.is_due()


def test_what_cannot_be_read_is_no_turn(tmp_path):
  clock = Clock()
  write(tmp_path, BEAT)
  watch = watching(tmp_path, clock)
  (tmp_path / "heartbeat.json").write_text("{")

  look_for(watch, clock, 20.0)
  assert not watch.is_due()
  assert "damaged" in watch.sentence()


def test_a_run_that_has_ended_is_nobodys_turn(tmp_path):
  clock = Clock()
  write(tmp_path, BEAT)
  watch = watching(tmp_path, clock)
  write(tmp_path, dataclasses.replace(BEAT, counter=2, ended="a limit"))

  look_for(watch, clock, 20.0)
  assert not watch.is_due()
  assert watch.ended
  assert watch.ended.ended == "a limit"
