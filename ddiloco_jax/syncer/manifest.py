"""Where the cuts of a run lie, and which of them are whole.

RUN/snapshots/ID/manifest.json is written last: a directory without it is no
cut. (arXiv 2604.21428, App. E.)
"""

import json
import pathlib

from ddiloco_jax.protocol import events, saved
from ddiloco_jax.syncer.files import Files

LATEST = "latest"
SYNCER = "syncer"  # Its part, below the cut's directory.
_NAME = "manifest.json"


def path_of(run_dir: pathlib.Path, snapshot: int) -> pathlib.Path:
  """Where a run keeps the syncer's part of a cut."""
  return run_dir / "snapshots" / str(snapshot)


def write(
  run_dir: pathlib.Path, over: events.SnapshotOver, files: Files
) -> None:
  """Says what a cut holds, once it is one."""
  path = path_of(run_dir, over.snapshot) / _NAME
  part = path.with_suffix(".part")
  part.write_text(json.dumps(saved.encode(over), allow_nan=False, indent=2))
  files.rename(part, path)


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
  _check(path / _NAME)
  return path


def run_dir_of(path: pathlib.Path) -> pathlib.Path:
  """Of the run that took the cut at RUN/snapshots/ID."""
  return path.absolute().parent.parent


def _number(path: pathlib.Path) -> int:
  """Of a cut, by its directory's name; 0 if it is none."""
  return int(path.name) if path.name.isdecimal() else 0


def _check(path: pathlib.Path) -> None:
  try:
    saved.decode(events.SnapshotOver, json.loads(path.read_text("utf-8")))
  except (OSError, ValueError) as error:
    raise ValueError(
      f"{path} is damaged: {error}. Take another snapshot, or bring this one"
      " back from a copy."
    ) from None
