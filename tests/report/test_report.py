"""What is told of a run: uptime, contributors, returns, the page."""

import dataclasses
import json
import math
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

from ddiloco_jax.report import figures, page, summary
from ddiloco_jax.report.history import (
  History,
  Life,
  Merge,
  Progress,
  contributors_median,
  learners_live_median,
  merges_after_return,
  merges_by_learner,
  steps_by_learner,
  uptime,
)

HELD_OUT = {"loss_start": 5.5, "loss_end": 2.2, "bigram_entropy": 2.6}


def life(learner="0", times=(), incarnation=1, end="run", first_step=1):
  progress = tuple(
    Progress(time, first_step + i, 5.0 / (1 + i))
    for i, time in enumerate(times)
  )
  return Life(
    learner=learner,
    incarnation=incarnation,
    start_s=times[0] - 1 if times else 0.0,
    end_s=times[-1] if times else 0.0,
    end=end,
    progress=progress,
  )


def merge(time_s, *contributors, num_live=2, fragment=0):
  return Merge(
    time_s=time_s,
    t=int(time_s),
    fragment=fragment,
    n=1,
    contributors=contributors,
    num_live=num_live,
  )


def make_history(*lives, end_s=60.0, merges=(), **fields) -> History:
  defaults = {
    "run_id": "r1",
    "cycle_steps": 24,
    "realised_h": (23.5, None, 31.0),
    "books": {
      "reported": 100.0,
      "merged": 90.0,
      "pending": 4.0,
      "discarded/late": 6.0,
      "discarded/end_of_run": 0.0,
    },
    "ending": "t reached 240",
  }
  return History(lives=lives, end_s=end_s, merges=merges, **(defaults | fields))


def every(step_s, start, stop):
  num = int((stop - start) / step_s)
  return tuple(start + step_s * i for i in range(num + 1))


def test_a_run_that_always_steps_is_always_up():
  assert uptime(make_history(life(times=every(1.0, 10, 60)))) == 1.0


def test_one_learner_is_enough_to_be_up():
  first = life("0", every(1.0, 10, 30))
  second = life("1", every(1.0, 28, 60))

  assert uptime(make_history(first, second)) == 1.0


def test_windows_without_a_step_are_down():
  before = life("0", every(1.0, 10, 30))
  after = life("0", every(1.0, 50.5, 60), incarnation=2)

  # Windows begin at 10 s: [10,15) ... [55,60). A step at 30.0 opens the fifth;
  # 35-50 are empty: 7 of 10.
  assert uptime(make_history(before, after)) == pytest.approx(0.7)


def test_a_pause_of_a_learner_is_down_and_coalesced_steps_are_up():
  paused = life(times=(10, 11, 12, 13, 14, 44, 45, 46, 47, 48, 49, 50))
  skipping = Life(
    learner="0",
    incarnation=1,
    start_s=9,
    end_s=40,
    end="run",
    progress=(
      Progress(10, 1, None),
      Progress(11, 2, None),
      Progress(40, 31, None),
    ),
  )

  assert uptime(make_history(paused, end_s=50)) == pytest.approx(3 / 8)
  assert uptime(make_history(skipping, end_s=40)) == 1.0


def test_a_step_longer_than_a_window_is_up_while_it_is_under_way():
  slow = life(times=every(12.0, 12, 60))

  assert uptime(make_history(slow)) == 1.0


def test_a_report_without_progress_is_no_step():
  idle = Life(
    learner="0",
    incarnation=1,
    start_s=0,
    end_s=30,
    end="run",
    progress=tuple(Progress(10.0 + i, 1, None) for i in range(20)),
  )

  assert uptime(make_history(idle, end_s=30)) == pytest.approx(1 / 4)


def test_a_run_without_a_step_has_no_uptime():
  assert uptime(make_history(life())) is None


def test_medians_count_learners_in_merges():
  merges = (
    merge(1, ("0", 1)),
    merge(2, ("0", 1), ("1", 1), num_live=3),
    merge(3, ("0", 1), ("1", 1), ("2", 1), num_live=3),
  )
  history = make_history(merges=merges)

  assert contributors_median(history) == 2
  assert learners_live_median(history) == 3
  assert merges_by_learner(history) == {"0": 3, "1": 2, "2": 1}
  assert contributors_median(make_history()) is None


def test_merges_after_a_return_are_those_of_later_lives():
  lives = (life("0"), life("1", incarnation=1), life("1", incarnation=3))
  merges = (
    merge(1, ("0", 1), ("1", 1)),
    merge(2, ("0", 1), ("1", 3)),
    merge(3, ("1", 3)),
  )

  assert merges_after_return(make_history(*lives, merges=merges)) == {"1": 2}


def test_steps_of_all_lives_are_counted():
  lives = (
    life("0", every(1, 1, 10)),
    life("1", every(1, 1, 4)),
    life("1", every(1, 8, 10), incarnation=2),
  )

  assert steps_by_learner(make_history(*lives)) == {"0": 10, "1": 7}


def test_the_summary_balances_and_is_strict_json(tmp_path):
  history = make_history(realised_h=(math.nan, 24.0))
  path = tmp_path / "summary.json"

  summary.write_summary(summary.summarise(history, HELD_OUT), path)

  def refuse(constant):
    raise AssertionError(constant)

  read = json.loads(path.read_text(), parse_constant=refuse)
  assert read["loss_end"] == 2.2
  assert read["realised_h"] == [None, 24.0]
  assert read["configured_h"] == 24
  assert read["tokens_processed"] == (
    read["tokens_merged"] + read["tokens_discarded"] + read["tokens_pending"]
  )
  assert read["tokens_discarded_by_reason"]["late"] == 6.0


def test_the_summary_reads_well_of_a_run_in_which_nothing_happened():
  empty = make_history(realised_h=(), books={}, ending="")

  text = summary.to_text(summary.summarise(empty, {}))

  assert "not evaluated" in text
  assert "no merge" in text


@pytest.fixture(scope="module")
def eventful() -> History:
  lives = [life(str(n), every(0.5, 5 + n, 90)) for n in (0, 2, 3)]
  lives += [
    life("1", every(0.5, 6, 30), end="lost"),
    life("1", every(0.5, 60, 90), incarnation=2),
  ]
  merges = tuple(
    merge(
      time,
      *[(str(n), 1) for n in (0, 2, 3)],
      num_live=4 if time < 45 else 3,
      fragment=int(time) % 3,
    )
    for time in every(1.0, 10, 90)
  )
  return make_history(*lives, merges=merges, end_s=90.0)


def test_every_figure_is_well_formed_and_says_its_words(eventful):
  drawn = figures.draw_all(eventful, HELD_OUT)

  for title, svg in drawn.items():
    ElementTree.fromstring(svg)
    assert len(svg) < 400_000, title
  assert "learner 1" in drawn["Learners"]
  assert "lost at 30 s" in drawn["Learners"]
  assert "back at 59 s" in drawn["Learners"]
  assert "bigram entropy" in drawn["Loss"]
  assert "late" in drawn["Tokens by book"]
  assert "end_of_run" not in drawn["Tokens by book"]


def test_figures_of_one_page_share_no_ids(eventful):
  drawn = figures.draw_all(eventful, HELD_OUT)

  ids = [
    set(re.findall(r'clip-path="url\(#(\w+)\)', s)) for s in drawn.values()
  ]
  for i, first in enumerate(ids):
    assert all(not first & second for second in ids[i + 1 :])


def test_a_run_in_which_nothing_happened_can_be_drawn():
  drawn = figures.draw_all(make_history(realised_h=(), books={}, merges=()), {})

  tags = {ElementTree.fromstring(svg).tag for svg in drawn.values()}
  assert len(drawn) == 5
  assert tags == {"{http://www.w3.org/2000/svg}svg"}


def test_a_loss_curve_keeps_few_points_and_its_mean():
  points = [Progress(float(i), i, float(i % 2)) for i in range(100_000)]

  kept = figures.smooth(points)

  assert len(kept) <= 400
  assert kept[3].loss == pytest.approx(0.5, abs=0.01)


def test_the_page_stands_alone(eventful, tmp_path):
  history = dataclasses.replace(eventful, run_id="<r&d>")
  told = summary.summarise(history, HELD_OUT)
  path = pathlib.Path(tmp_path / "report.html")

  page.write_page(
    told, summary.to_text(told), figures.draw_all(history, HELD_OUT), path
  )

  text = path.read_text()
  assert "&lt;r&amp;d&gt;" in text
  assert "<r&d>" not in text
  assert text.count("<svg") == 5
  fetched = re.findall(r'(?:src|href)="(?!#)[^"]*"', text)
  assert not fetched
