import pathlib
import sys

import numpy as np
import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def scripts(monkeypatch):
  """The study of scripts/quality.py, imported as its program does."""
  monkeypatch.syspath_prepend(str(SCRIPTS))
  import improvement
  import quality

  yield quality, improvement
  for name in ("quality", "improvement", "resumable"):
    sys.modules.pop(name, None)


def study(quality, *overrides, **changes):
  settings = {"steps": 60, "learners": 4, "windows": 32} | changes
  return quality.Comparison(overrides=overrides, **settings)


def test_windows_are_paired_and_their_error_is_that_of_resampling(scripts):
  _, improvement = scripts
  rng = np.random.default_rng(0)
  lone = rng.uniform(1.0, 3.0, 400)
  better = 0.9 * lone + 0.02 * rng.normal(size=400)

  percent, error = improvement.improvement(better, lone)

  picks = rng.integers(0, 400, (2000, 400))
  again = 100 * (1 - better[picks].mean(1) / lone[picks].mean(1))
  assert percent == pytest.approx(10.0, abs=0.2)
  assert error == pytest.approx(again.std(), rel=0.1)


def test_the_interval_over_seeds_is_students(scripts):
  _, improvement = scripts
  rows = [{"improvement_percent": x} for x in (4.0, 5.0, 6.0)]

  figures = improvement.over_seeds(rows)

  half = 4.3027 / 3**0.5  # 97.5 % point of 2 degrees of freedom.
  assert figures["improvement_percent"] == 5.0
  assert figures["improvement_low"] == pytest.approx(5.0 - half, abs=1e-3)
  assert figures["improvement_high"] == pytest.approx(5.0 + half, abs=1e-3)


def test_one_seed_has_no_interval(scripts):
  _, improvement = scripts

  figures = improvement.over_seeds([{"improvement_percent": 4.0}])

  assert figures["improvement_low"] is None


def test_other_settings_of_any_kind_have_another_directory(scripts):
  quality, _ = scripts
  keys = [
    study(quality, *overrides, **changes).key()
    for overrides, changes in (
      ((), {}),
      ((), {"steps": 61}),
      ((), {"learners": 3}),
      ((), {"windows": 33}),
      (("--config.outer.learning_rate=1.0",), {}),
      (("--config.outer.learning_rate=0.9",), {}),
    )
  ]

  assert len(set(keys)) == len(keys)
  assert study(quality).key() == keys[0]


@pytest.mark.parametrize(
  "override",
  ["--config.run.seed=3", "--config.train.decay_steps=9", "left over"],
)
def test_what_an_option_sets_is_no_override(scripts, override):
  quality, _ = scripts

  with pytest.raises(ValueError):
    study(quality, override).key()


def test_both_arms_differ_in_their_length_alone(scripts):
  quality, _ = scripts
  ours = study(quality, "--config.train.batch_size=4")

  four, lone = ours.flags(60, seed=1), ours.flags(43, seed=1)

  assert [a.replace("=60", "=43") for a in four] == list(lone)
  assert "--config.train.batch_size=4" in lone
  assert "--config.train.decay_steps=43" in lone
