"""The tapes of a run directory: the newest, and those of earlier epochs.

They say which versions learners can have been told of: what was restored must
not be older without a word.
"""

import pathlib

from ddiloco_jax.protocol import tail
from ddiloco_jax.syncer.errors import InUse
from ddiloco_jax.syncer.files import Files


class Tapes:
  """Looks at the tapes, and sets the newest aside for the next epoch's.

  Args:
    directory: Of the run.
    files: Operations on files.
    last_begun: The newest epoch that the journal knows to have begun.

  Attributes:
    published: What the newest tape that says so knows; None if none does.
    epoch: The newest epoch of all; 0 without a tape.

  Raises:
    InUse: the newest tape's place among the earlier ones is taken.
  """

  def __init__(self, directory: pathlib.Path, files: Files, last_begun: int):
    self.newest = directory / "tape.jsonl"
    self._files = files
    aside = _set_aside(directory)
    self.epoch = max(aside, default=0)
    paths = [path for _, path in sorted(aside.items())]
    self.published: tail.Published | None = None
    if self.newest.exists():
      self.published = tail.published(self.newest)
      if self.published is not None:
        last = self.published.epoch
      else:  # A syncer that was killed as it started, or damage.
        last = max(last_begun, self.epoch + 1)
      self._aside = directory / f"tape.{last}.jsonl"
      if self._aside.exists():
        raise InUse(
          f"{self.newest} is of epoch {last}, and {self._aside} is there"
          " already: no tape is ever written over. Move one of them away."
        )
      self.epoch = max(self.epoch, last)
    while self.published is None and paths:
      self.published = tail.published(paths.pop())

  def set_aside(self) -> None:
    """Makes way for a tape of its own for the epoch that begins."""
    if self.newest.exists():
      self._files.rename(self.newest, self._aside)


def _set_aside(directory: pathlib.Path) -> dict[int, pathlib.Path]:
  found = {}
  for path in directory.glob("tape.*.jsonl"):
    number = path.name.removeprefix("tape.").removesuffix(".jsonl")
    if number.isdecimal():
      found[int(number)] = path
  return found
