"""A run as data: which processes, started how."""

import pathlib

import pytest

from ddiloco_jax.launch.failures import (
  Moment,
  Progress,
  check_ends,
  parse_kill,
)
from ddiloco_jax.launch.plan import ADDRESS, RunPlan, plan_run


def make_plan(**fields) -> RunPlan:
  return RunPlan(
    config="configs/tiny.py", run_dir=pathlib.Path("runs/x"), **fields
  )


def test_a_run_is_a_syncer_and_its_learners():
  processes = plan_run(make_plan(num_learners=3))

  names = [p.name for p in processes]
  assert names == ["syncer", "learner-0", "learner-1", "learner-2"]
  assert "--learner_id=2" in processes[3].argv
  assert f"--syncer={ADDRESS}" in processes[3].argv


def test_only_a_second_life_takes_over_or_restores():
  syncer, learner = plan_run(make_plan(num_learners=1))

  assert "--takeover" not in learner.argv
  assert "--takeover" in learner.again
  assert "--restore" in learner.again
  assert "--restore" not in syncer.argv
  assert "--restore" in syncer.again
  assert f"--address={ADDRESS}" in syncer.again


def test_a_restored_run_restores_from_its_first_life_on():
  syncer, _ = plan_run(make_plan(num_learners=1, restore=True))

  assert "--restore" in syncer.argv


def test_what_the_syncer_owns_is_told_to_the_syncer_only():
  ours = ("--config.sync.quorum=2", "--config.wire.chunk_bytes=4096")
  theirs = ("--config.train.batch_size=4", "--config.wire.keepalive_s=3")

  syncer, learner = plan_run(
    make_plan(
      num_learners=1,
      overrides=(*ours, *theirs),
      owned=("sync", "wire.chunk_bytes"),
    )
  )

  assert {*ours, *theirs} <= set(syncer.argv)
  assert not {*ours} & set(learner.argv)
  assert {*theirs} <= set(learner.argv)


def test_all_processes_share_one_compilation_cache():
  processes = plan_run(make_plan())

  caches = {p.env["JAX_COMPILATION_CACHE_DIR"] for p in processes}
  assert len(caches) == 1


@pytest.mark.parametrize("override", ["--config.sync.quorum", "--quorum=2"])
def test_an_odd_override_is_an_error(override):
  with pytest.raises(ValueError, match=r"--config\.section\.field=value"):
    plan_run(make_plan(overrides=(override,)))


def test_a_run_without_learners_is_an_error():
  with pytest.raises(ValueError, match="at least 1 learner"):
    plan_run(make_plan(num_learners=0))


def test_a_kill_is_read_in_per_cent_and_in_seconds():
  kill = parse_kill("1@33%:66%", 4)
  other = parse_kill("syncer@20:25", 4)

  assert kill.process == "learner-1"
  assert kill.when == Moment(33, "%")
  assert kill.restart == Moment(66, "%")
  assert other.process == "syncer"
  assert other.when == Moment(20, "s")
  assert parse_kill("0@5s", 1).restart is None


def test_a_syncer_is_not_started_again_at_a_share_of_a_run_that_stands_still():
  with pytest.raises(ValueError, match="restart of the syncer in seconds"):
    parse_kill("syncer@20%:40%", 4)


@pytest.mark.parametrize(
  ("text", "told"),
  [
    ("1", "expected LEARNER@TIME"),
    ("1@", "expected LEARNER@TIME"),
    ("@3", "expected LEARNER@TIME"),
    ("1@3:", "expected LEARNER@TIME"),
    ("1@soon", "no time"),
    ("1@-3", "no time"),
    ("1@120%", "beyond the run's end"),
    ("1@66%:33%", "not after"),
    ("1@5:5s", "not after"),
    ("4@5", "no learner '4'"),
    ("bob@5", "no learner 'bob'"),
  ],
)
def test_a_bad_kill_says_what_is_wrong(text, told):
  with pytest.raises(ValueError, match=told):
    parse_kill(text, 4)


def test_a_moment_is_past_when_the_run_has_come_so_far():
  third = Moment(33, "%")

  assert not third.is_past(Progress(1e9, 32, 100))
  assert third.is_past(Progress(0, 33, 100))
  assert not third.is_past(Progress(1e9, 50, 0))
  assert Moment(20, "s").is_past(Progress(20.0))
  assert not Moment(20, "s").is_past(Progress(19.9))


def test_per_cent_of_a_run_without_an_end_is_an_error():
  with pytest.raises(ValueError, match="num_syncer_steps"):
    check_ends((parse_kill("1@5s:66%", 4),), 0)
  check_ends((parse_kill("1@5s:66%", 4),), 100)
  check_ends((parse_kill("1@5s", 4),), 0)
