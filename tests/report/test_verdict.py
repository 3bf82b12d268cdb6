"""What a verdict says of storms in which this and that went wrong."""

import json
import statistics

import pytest

from ddiloco_jax.protocol import events
from ddiloco_jax.report import ordeal, verdict
from tests.report import storms


def told(run_dir):
  return verdict.measure(ordeal.read_ordeal(run_dir), storms.NUM)


def fallen(figures):
  return {bar.name for bar in verdict.judge(figures) if not bar.holds}


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
  """One learner is dead from 30 to 50 s of 90."""
  run_dir = tmp_path_factory.mktemp("calm")
  return run_dir, storms.had(run_dir, storms.fleet(), [("1", 30.2, 50.2)])


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
  """The syncer comes back with all that it had published."""
  run_dir = tmp_path_factory.mktemp("kept")
  return run_dir, *storms.with_a_killed_syncer(run_dir, saved_s=40.0)


@pytest.fixture(scope="module")
def lossy(tmp_path_factory):
  """It comes back with what it had ten seconds before."""
  run_dir = tmp_path_factory.mktemp("lossy")
  return run_dir, *storms.with_a_killed_syncer(run_dir, saved_s=30.0)


def test_a_storm_that_was_borne_holds(calm):
  run_dir, run = calm

  figures = told(run_dir)

  assert fallen(figures) == set()
  assert figures["uptime"] == 1.0
  assert figures["num_faults"] == 1
  assert figures["num_merges"] == len(run.of(events.Merge))
  # Not live from the end of its connection, or its lease, until it was back.
  assert 4 - 20 / 90 <= figures["live_mean"] <= 4 - 15 / 90
  assert figures["contributors_over_eligible_median"] == 1.0
  assert figures["contributors_median"] == 4.0
  assert figures["version_gap_max_s"] == pytest.approx(3.0, abs=1.1)


def test_a_return_is_timed_from_the_start_of_the_process(calm):
  run_dir, run = calm

  figures = told(run_dir)

  joined, merged = None, None
  for effect, at_s in zip(run.effects, run.times, strict=True):
    if isinstance(effect, events.Welcome) and effect.nonce == "1-1":
      joined = at_s
    if isinstance(effect, events.Merge) and joined and merged is None:
      back = [i for i in effect.inputs if i.key.learner == "1"]
      merged = at_s if back else None
  began = storms.BEGAN_S + 50.2
  assert figures["num_learner_returns"] == 1
  assert figures["learner_return_s_median"] == pytest.approx(merged - began)
  # Its join, and two slots of 12 / 4 steps of a second.
  bound = joined - began + 6.0
  assert figures["learner_return_bound_s"] == pytest.approx(bound, abs=0.3)


def test_a_return_in_which_another_fault_falls_is_not_counted(calm):
  run_dir, _ = calm
  path = run_dir / "faults.jsonl"
  text = path.read_text()
  other = storms.fault(50.3, "learner-1", "stop", 3.0)
  path.write_text(
    text.replace(
      '{"what": "over"', f"{json.dumps(other)}\n{{" + '"what": "over"'
    )
  )

  figures = told(run_dir)
  path.write_text(text)

  assert figures["num_learner_returns"] == 0
  assert "learner_return_s_median" not in fallen(figures)


def test_a_syncer_that_kept_everything_lost_and_repeated_nothing(kept):
  run_dir, *_ = kept

  figures = told(run_dir)

  assert fallen(figures) == set()
  assert figures["num_syncer_returns"] == 1
  assert figures["syncer_return_s_max"] == pytest.approx(0.4)
  assert 0.4 < figures["syncer_next_merge_s_max"] < 4.0
  # The five seconds without a syncer are no gap: steps went on.
  assert figures["version_gap_max_s"] < 5.0


def test_versions_that_were_rolled_back_are_lost_and_come_twice(lossy):
  run_dir, first, last = lossy
  saved_n = last.state.starts[1]
  published = [f.version.n for f in first.state.fragments]
  rolled_back = sum(a - b for a, b in zip(published, saved_n, strict=True))
  assert rolled_back >= 2  # The case.

  figures = told(run_dir)

  assert figures["versions_lost"] == rolled_back
  assert figures["versions_repeated"] == rolled_back
  assert fallen(figures) == {"versions_lost", "versions_repeated"}
  assert last.state.fragments[0].version.n >= published[0]


def test_learners_that_waited_for_the_syncer_were_down(tmp_path):
  storms.with_a_killed_syncer(tmp_path, saved_s=40.0, steps_alone=0)

  figures = told(tmp_path)

  assert figures["uptime"] == pytest.approx(17 / 18)
  assert fallen(figures) == {"uptime"}


def test_a_slow_return_to_a_syncer_falls(tmp_path):
  storms.with_a_killed_syncer(tmp_path, saved_s=40.0, back_after_s=2.5)

  figures = told(tmp_path)

  assert figures["syncer_return_s_max"] == pytest.approx(2.5)
  assert "syncer_return_s_max" in fallen(figures)


def test_a_time_without_learners_is_a_gap_and_downtime(tmp_path):
  deaths = [(str(n), 30.2, 55.2) for n in range(storms.NUM)]
  storms.had(tmp_path, storms.fleet(), deaths)

  figures = told(tmp_path)

  assert 25.0 < figures["version_gap_max_s"] < 40.0
  assert figures["uptime"] == pytest.approx(1 - 5 / 18, abs=0.06)
  assert {"uptime", "version_gap_max_s"} <= fallen(figures)
  assert figures["versions_lost"] == 0


def test_learners_whose_replies_are_late_do_not_contribute(tmp_path):
  learners = storms.fleet()
  learners[0].push_s = learners[1].push_s = 40.0
  run = storms.had(tmp_path, learners)

  figures = told(tmp_path)

  late = statistics.median(len(m.inputs) for m in run.of(events.Merge))
  assert late < 4
  assert figures["contributors_median"] == late
  assert figures["live_mean"] == pytest.approx(4.0)


def test_an_account_that_does_not_add_up_is_found(calm):
  _, run = calm
  accounts = dict(run.state.accounts)
  first, *others = accounts["2"]
  assert ordeal.is_balanced(run.state)

  for amount in (-1, 1):
    steps, tokens = first.merged
    wrong = first._replace(merged=events.Counts(steps, tokens + amount))
    accounts["2"] = (wrong, *others)
    state = run.state._replace(accounts=dict(accounts))
    assert not ordeal.is_balanced(state)


def test_a_storm_that_was_cut_short_has_no_verdict(calm, tmp_path):
  run_dir, _ = calm
  for path in run_dir.iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  path = tmp_path / "faults.jsonl"
  text = [x for x in path.read_text().splitlines() if '"over"' not in x]
  path.write_text("\n".join(text))

  with pytest.raises(ValueError, match="ended before"):
    told(tmp_path)


def test_without_faults_jsonl_there_is_no_ordeal(tmp_path):
  with pytest.raises(ValueError, match=r"ddiloco_jax\.cli\.storm"):
    ordeal.read_ordeal(tmp_path)


GOOD = {
  "num_learners": 8,
  "uptime": 1.0,
  "versions_lost": 0,
  "versions_repeated": 0,
  "ledger_balanced": True,
  "contributors_over_eligible_median": 7 / 8,
  "live_mean": 6.0,
  "version_gap_max_s": 10.0,
  "num_learner_returns": 3,
  "learner_return_s_median": 5.0,
  "learner_return_bound_s": 5.0,
  "num_syncer_returns": 1,
  "syncer_return_s_max": 2.0,
  "syncer_next_merge_s_max": 4.0,
  "syncer_next_merge_bound_s": 4.0,
  "loss_ratio_to_fault_free": 1.02,
}


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("uptime", 0.99),
    ("versions_lost", 1),
    ("versions_repeated", 1),
    ("ledger_balanced", False),
    ("contributors_over_eligible_median", 0.874),
    ("live_mean", 5.99),
    ("version_gap_max_s", 10.1),
    ("learner_return_s_median", 5.1),
    ("syncer_return_s_max", 2.1),
    ("syncer_next_merge_s_max", 4.1),
    ("loss_ratio_to_fault_free", 1.021),
    ("uptime", None),
    ("loss_ratio_to_fault_free", None),
  ],
)
def test_every_bar_falls_by_itself(name, value):
  assert fallen(GOOD) == set()
  figures = {**GOOD, name: value}

  assert fallen(figures) == {name}
  bars = verdict.judge(figures)
  assert f"FAIL  {name}" in verdict.to_text(bars)
  assert not verdict.holds([bars], verdict.mean_loss_ratio([figures]))


def test_of_the_losses_the_mean_over_storms_is_judged():
  seeds = [
    {**GOOD, "loss_ratio_to_fault_free": ratio} for ratio in (1.05, 0.98, 1.0)
  ]
  bars = [verdict.judge(figures) for figures in seeds]

  mean = verdict.mean_loss_ratio(seeds)

  assert mean == pytest.approx(1.01)
  assert verdict.holds(bars, mean)
  assert not verdict.holds(bars, 1.03)
  assert not verdict.holds(bars, None)


def test_without_a_storm_nothing_holds():
  assert not verdict.holds([], None)
  assert not verdict.holds([[]], None)
