"""The flags of a storm: what cannot be is refused before anything is written."""

import json

import numpy as np
import pytest

from ddiloco_jax.cli import storm as command
from ddiloco_jax.launch import arrays, exits, numpy_model, storm, storm_flags

TINY = "--config=configs/storm_tiny.py"
HUGE = "9" * 400


def asked(base, *given):
  """The storms that a command line asks for."""
  parser = storm_flags.make_parser("")
  flags, overrides = parser.parse_known_args([TINY, *given])
  flags.run_dir = base
  return list(storm_flags.configs(flags, tuple(overrides)))


REFUSED = [
  ("--seeds=0", "--seeds=0: .*from 1 to 1000"),
  ("--seeds=-2", "--seeds=-2: .*from 1 to 1000"),
  (f"--seeds={HUGE}", "--seeds=9+: .*from 1 to 1000"),
  ("--seed=-1", "run.seed is -1"),
  (f"--seed={HUGE}", "run.seed is 9+"),
  (
    "--minutes=inf",
    "duration_s is inf; .*at most 604800 s, a week: give another",
  ),
  ("--minutes=1e308", "duration_s is inf; .*at most 604800"),
  ("--minutes=1e9", "duration_s is 60000000000.0; .*at most 604800"),
  ("--minutes=nan", "duration_s is nan; .*above 0"),
  ("--faults_per_hour=inf", "faults_per_hour is inf; .*at most 36000"),
  ("--faults_per_hour=1e308", r"faults_per_hour is 1e\+308; .*: give fewer"),
  ("--faults_per_hour=nan", "faults_per_hour is nan; .*at least 0"),
  ("--down_s=inf", "down_s is inf; .*at most 604800"),
  ("--down_s=nan", "down_s is nan; .*above 0"),
  (f"--syncer_kills={HUGE}", "do not fit into 300 s"),
  ("--step_s=inf", "run.step_s is inf.*finite"),
  ("--step_s=nan", "run.step_s is nan.*finite"),
  ("--step_s=-1", "run.step_s is -1.0: .*from 0 to 86400"),
  ("--step_s=1e308", r"run.step_s is 1e\+308: .*from 0 to 86400"),
  ("--learners=0", "--learners=0: .*from 1 to 1000"),
  (f"--learners={HUGE}", "--learners=9+: .*from 1 to 1000"),
  ("--learners=17", "--learners=17: .*sync.max_learners=16"),
  ("nonsense", "'nonsense' is no override"),
  ("--config.run.sed=1", "'run.sed'.*'run.seed'"),
  ("--config.sync.quorum=99", "sync.quorum=99"),
  ("--config.sync.quorum=x", "sync.quorum"),
]


@pytest.mark.parametrize("learners", [(), ("--numpy_learners",)])
@pytest.mark.parametrize(("flag", "said"), REFUSED)
def test_a_storm_that_cannot_be_leaves_nothing_behind(
  tmp_path, flag, said, learners
):
  base = tmp_path / "storms"

  with pytest.raises(exits.BadUsage, match=said):
    asked(base, *learners, flag)

  assert not base.exists()
  assert len(asked(base, *learners)) == 1


def test_a_later_storm_that_cannot_be_is_refused_before_the_first(tmp_path):
  base = tmp_path / "storms"

  with pytest.raises(exits.BadUsage, match=r"run\.seed is 4294967296"):
    asked(base, "--numpy_learners", f"--seed={2**32 - 1}", "--seeds=2")

  assert not base.exists()


def test_the_command_says_it_in_a_line(tmp_path, capsys):
  base = tmp_path / "storms"

  with pytest.raises(SystemExit) as ended:
    command.main([TINY, "--seeds=0", f"--run_dir={base}"])

  assert ended.value.code == exits.BAD_USAGE
  assert "error: --seeds=0" in capsys.readouterr().err
  assert not base.exists()


def test_numpy_learners_begin_with_the_parameters_of_their_seed(tmp_path):
  (cfg,) = asked(tmp_path / "storms", "--numpy_learners", "--seed=3")

  storm.lay_out(cfg)

  assert cfg.run.numpy
  theta = arrays.load_arrays(str(cfg.run.numpy.theta))
  expected = numpy_model.init_params(3)
  assert sorted(theta) == sorted(expected)
  for path, array in expected.items():
    np.testing.assert_array_equal(theta[path], array)


def test_without_a_storm_no_verdict_holds(capsys):
  said = []

  holds = storm.conclude([], said.append, as_json=True)

  assert holds is False
  assert said == ["the verdict does not hold"]
  assert json.loads(capsys.readouterr().out)["holds"] is False
