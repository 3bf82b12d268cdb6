"""Writes report.html and summary.json of a run, from its own records alone."""

import pathlib
from collections.abc import Mapping
from typing import Any

from ddiloco_jax.report import chronicle, faults, figures, page, summary


def write_report(
  run_dir: pathlib.Path, held_out: Mapping[str, float | None]
) -> dict[str, Any]:
  """Writes both files into the run's directory.

  Args:
    run_dir: Of a run that has ended, or still goes on.
    held_out: loss_start, loss_end, bigram_entropy; what is missing is unknown.

  Returns:
    What summary.json says.

  Raises:
    ValueError: the directory has no tape that can be read.
  """
  history = chronicle.read_history(run_dir)
  told = summary.summarise(history, held_out)
  page.write_page(
    told,
    summary.to_text(told),
    figures.draw_all(history, held_out, faults.read_marks(run_dir)),
    run_dir / "report.html",
  )
  summary.write_summary(told, run_dir / "summary.json")
  return told


def merged_tokens(run_dir: pathlib.Path) -> float:
  """Tokens that a run has merged, from its tapes."""
  return chronicle.read_history(run_dir).books.get("merged", 0.0)
