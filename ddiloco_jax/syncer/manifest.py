"""Where the cuts of a run lie, and which of them are whole.

RUN/snapshots/ID/manifest.json is written last: a directory without it is no
cut. A number is used once in a directory. (arXiv 2604.21428, App. E.)
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from ddiloco_jax.protocol import events, saved
from ddiloco_jax.protocol.state import Cut
from ddiloco_jax.syncer.files import Files

LATEST = "latest"
SYNCER = "syncer"  # Its part, below the cut's directory.
_NAME = "manifest.json"
_FIX = "Take another snapshot, or bring this one back from a copy."


def path_of(run_dir: pathlib.Path, snapshot: int) -> pathlib.Path:
  """Where a run keeps the syncer's part of a cut."""
  return run_dir / "snapshots" / str(snapshot)


def last(run_dir: pathlib.Path) -> int:
  """The highest number of any part of a cut here, whole or not; 0: none."""
  found = [
    *run_dir.glob("snapshots/*"),
    *run_dir.glob("learners/*/snapshots/*"),
  ]
  return max(map(_number, found), default=0)


def write(
  run_dir: pathlib.Path, over: events.SnapshotOver, files: Files
) -> None:
  """Says what a cut holds; it is one once this returns.

  Raises:
    OSError: it could not be written.
  """
  path = path_of(run_dir, over.snapshot) / _NAME
  part = path.with_suffix(".part")
  text = json.dumps(saved.encode(over), allow_nan=False, indent=2)
  fd = files.create(part)
  try:
    files.write(fd, memoryview(text.encode()))
    files.sync(fd)
  finally:
    files.close(fd)
  files.rename(part, path)
  files.sync_directory(path.parent)


def find(path: pathlib.Path) -> pathlib.Path:
  """The directory of a whole cut.

  Args:
    path: RUN/snapshots/ID, or RUN/snapshots/latest for the newest one.

  Raises:
    ValueError: there is none.
  """
  whole = sorted(
    (p.parent for p in path.parent.glob(f"*/{_NAME}") if _number(p.parent)),
    key=_number,
  )
  names = ", ".join(p.name for p in whole) or "none"
  if path.name == LATEST and whole:
    path = whole[-1]
  elif not _number(path) or path not in whole:
    raise ValueError(
      f"{path} is no whole snapshot: one has a {_NAME}, which is written last."
      f" Give RUN_DIR/snapshots/ID, with ID one of those in {path.parent}"
      f" ({names}), or {LATEST}."
    )
  read(path)
  return path


def read(path: pathlib.Path) -> events.SnapshotOver:
  """What the cut in a directory holds.

  Raises:
    ValueError: its manifest is damaged, or of another cut.
  """
  name = path / _NAME
  try:
    over = saved.decode(
      events.SnapshotOver, json.loads(name.read_text("utf-8"))
    )
  except (OSError, ValueError) as error:
    raise ValueError(f"{name} is damaged: {error}. {_FIX}") from None
  if over.snapshot != _number(path):
    raise ValueError(
      f"{name} is of snapshot {over.snapshot}, and lies in that of snapshot"
      f" {path.name}. {_FIX}"
    )
  return over


def check(path: pathlib.Path, state: dict[str, Any]) -> None:
  """Refuses a manifest that the syncer's part does not bear out.

  Args:
    path: Of the cut.
    state: What `machine.save` gave when the markers were sent.

  Raises:
    ValueError: names what differs.
  """
  over, cut = read(path), saved.decode(Cut | None, state["cut"])
  said = sorted([*over.learners, *_names(over.skipped)])
  known = []
  if cut:  # Who was away, and got no marker, is skipped from the start.
    known = [m.learner for m in cut.awaited] + _names(cut.skipped)
  for what, mine, its in (
    ("number", over.snapshot, cut and cut.snapshot),
    ("clock", over.clock, cut and cut.clock),
    ("learners, with the skipped ones,", said, sorted(known)),
  ):
    if mine != its:
      raise ValueError(
        f"{path / _NAME} and {path / SYNCER} are not of one cut: the {what} is"
        f" {mine} in the one and {its} in the other. {_FIX}"
      )


def run_dir_of(path: pathlib.Path) -> pathlib.Path:
  """Of the run that took the cut at RUN/snapshots/ID."""
  return path.absolute().parent.parent


def _names(skipped: Sequence[str]) -> list[str]:
  return [text.partition(":")[0] for text in skipped]


def _number(path: pathlib.Path) -> int:
  """Of a cut, by its directory's name; 0 if it is none."""
  return int(path.name) if path.name.isdecimal() else 0
