"""A storm's faults in the report of its run."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from ddiloco_jax.report import chronicle, faults, figures, report
from tests.report import storms


def test_faults_are_told_on_the_runs_own_clock(tmp_path):
  storms.with_a_killed_syncer(tmp_path, saved_s=40.0)
  storms.write_lines(
    tmp_path,
    [
      storms.fault(20.0, "learner-2", "stop", 4.0),
      storms.line("fault_over", 24.1, process="learner-2"),
      {**storms.fault(22.0, "learner-0", "slow", 4.0), "done": False},
      storms.fault(40.0, "syncer", "kill", 5.0),
      storms.line("silent", 40.0, epoch=1),
      storms.fault(41.0, "learner-1", "kill", 2.0),
      storms.line("start", 43.0, process="learner-1", life=2),
      storms.fault(44.0, "learner-3", "partition", 5.0),
      storms.line("listening", 45.0, epoch=2),
      storms.line("fault_over", 49.0, process="learner-3"),
    ],
    (-10.0, -5.0),  # The run's clock stood still for five seconds.
  )

  marks = faults.read_marks(tmp_path)

  assert marks == (
    faults.Mark("2", "stop", 30.0, pytest.approx(34.1)),
    faults.Mark("syncer", "kill", 50.0, 50.0),
    faults.Mark("1", "kill", 50.0, 50.0),
    faults.Mark("3", "partition", 50.0, 54.0),
  )


def test_the_report_of_a_storm_marks_every_kind_of_fault(tmp_path):
  storms.had(tmp_path, storms.fleet(), [("1", 30.2, 50.2)])
  text = (tmp_path / "faults.jsonl").read_text()
  other = storms.fault(12.0, "learner-2", "partition", 6.0)
  storms.write_lines(
    tmp_path, [other, storms.fault(30.2, "learner-1", "kill", 20.0)]
  )

  report.write_report(tmp_path, {})
  page = (tmp_path / "report.html").read_text()

  assert "kill" in text
  learners = page[page.index("<h2>Learners") : page.index("<h2>Contributors")]
  assert ">partition</text>" in learners
  assert ">kill</text>" in learners
  assert ">stop</text>" not in learners
  assert not re.search(r"(src|href)=\"?http", page)
  ElementTree.fromstring(
    learners[learners.index("<svg") : learners.rindex("</svg>") + 6]
  )


def test_a_fault_lies_where_and_as_long_as_it_was(tmp_path):
  storms.had(tmp_path, storms.fleet())
  history = chronicle.read_history(tmp_path)
  mark = faults.Mark("2", "stop", 30.0, 37.0)
  killed = faults.Mark("syncer", "kill", 50.0, 50.0)
  found = {}

  def draw(ax):
    figures.draw_learners(ax, history, [mark, killed])
    found["bars"] = [
      (bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2)
      for bar in ax.patches
    ]
    found["lines"] = [list(line.get_xdata()) for line in ax.lines]

  figures.to_svg(draw, 2.0, "x")

  assert (30.0, 7.0, pytest.approx(2.36)) in found["bars"]
  assert [50.0, 50.0] in found["lines"]


def test_without_a_storm_and_with_one_cut_short_there_are_no_marks(tmp_path):
  assert faults.read_marks(tmp_path) == ()

  storms.write_lines(tmp_path, [storms.fault(20.0, "learner-2", "stop", 4.0)])
  path = tmp_path / "faults.jsonl"
  kept = [x for x in path.read_text().splitlines() if '"clock"' not in x]
  path.write_text("\n".join(kept))

  assert faults.read_marks(tmp_path) == ()
