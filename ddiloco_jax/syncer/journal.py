"""The write-ahead log of a run: what was published is in it before.

RUN/journal holds EPOCH-NUMBER.log: the first file of an epoch is created
exclusively, which takes the epoch for its process and fences every earlier one;
a checkpoint begins the next file. The first record of a file names the file
before it and how much of that counts, so that what is written there later, or
was torn there, counts for nothing. (spec: algorithm, section 8.)
"""

import logging
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddiloco_jax.syncer import records
from ddiloco_jax.syncer.errors import Superseded
from ddiloco_jax.syncer.files import Files

_log = logging.getLogger(__name__)

FORMAT = 1  # Raised whenever an older reader would misread a newer file.
_DIGITS = 6  # Of an epoch; other names are not ours.


class Name(NamedTuple):
  """Names a file of a journal."""

  epoch: int
  number: int


class Place(NamedTuple):
  """The end of what counts in a file."""

  epoch: int
  number: int
  offset: int

  @property
  def name(self) -> Name:
    return Name(self.epoch, self.number)


class Entry(NamedTuple):
  """A record, where it ends, and the file's first record."""

  head: dict[str, Any]
  arrays: list[np.ndarray]
  place: Place


class Journal:
  """Appends to the journal of one run directory, from any thread.

  Args:
    directory: Made with the first file.
    files: Operations on files.

  Attributes:
    damage: Sentences: what `entries` has come across so far.
    end: A sentence: where it ended; files that a crash may have left as they
      are, and that may be damaged just as well.
    fenced: The newest epoch that this process has taken; 0 for none.
  """

  def __init__(self, directory: pathlib.Path, files: Files):
    self.directory = directory
    self._files = files
    self.damage: list[str] = []
    self.end = "there is no file of it that counts"
    self.fenced = 0
    self._lock = threading.Lock()
    self._head: dict[str, Any] = {}
    self._fd = -1
    self._at = Place(0, 0, 0)  # Where the next record goes.
    self._starts: dict[Name, int] = {}  # Merges before each file that counts.
    self._num_merges = 0
    self._is_fresh = True  # The newest file has no commit.
    self._is_broken = False  # The newest file ends in a torn record.

  def last_epoch(self) -> int:
    """The newest epoch that a process has taken; 0 if there is none."""
    return max((name.epoch for name in self._names()), default=0)

  def last_begun(self) -> int:
    """The newest epoch whose process went on to begin; 0 if there is none."""
    newest = self._newest()
    return 0 if newest is None else newest[0].epoch

  def least_begun(self, epoch: int) -> int | None:
    """The fewest merges with which a file of a later epoch than this begins.

    What a process of this epoch did beyond them counts for nothing.
    """
    later = (self._read_head(n) for n in self._names() if n.epoch > epoch)
    return min((head["num_merges"] for head in later if head), default=None)

  def fence(self, epoch: int) -> None:
    """Takes an epoch: every process of an earlier one publishes no more.

    Raises:
      FileExistsError: another process has taken it.
    """
    self.close()  # Of an earlier one that was not begun.
    self.directory.mkdir(parents=True, exist_ok=True)
    self._create(Name(epoch, 0))
    self.fenced = epoch

  def begin(
    self, head: dict[str, Any], previous: Place | None, num_merges: int
  ) -> None:
    """Makes the fenced epoch one that counts.

    Args:
      head: What every file of the epoch says of its run.
      previous: What this epoch goes on from.
      num_merges: Merges in it.
    """
    self._head = head
    self._num_merges = num_merges
    self._write_head(previous)

  def append(
    self, head: dict[str, Any], arrays: Sequence[np.ndarray], num_merges: int
  ) -> None:
    """Returns once a record is on disk, and no later epoch has begun.

    Args:
      head: JSON values.
      arrays: On the host; not kept.
      num_merges: Merges of the run with this one.

    Raises:
      OSError: it could not be written; it may be tried again.
      Superseded: another process has taken over the run.
    """
    with self._lock:
      if self._is_broken:
        self._rotate()
      self._write(head, arrays)
      self._is_fresh = False
      self._num_merges = num_merges
    self.check_not_superseded()

  def check_not_superseded(self) -> None:
    """Raises Superseded if another process has taken over the run."""
    newest = self.last_epoch()
    if newest > self._at.epoch:
      raise Superseded(
        f"epoch {newest} of the run in {self.directory.parent} has begun: the"
        f" syncer of epoch {self._at.epoch} publishes nothing more. Its"
        " learners find the other syncer by themselves."
      )

  def rotate(self) -> None:
    """Begins the next file, so that a checkpoint made now covers the others."""
    with self._lock:
      if not self._is_fresh:
        self._rotate()

  def drop_covered(self, num_merges: int) -> None:
    """Deletes the files whose every commit a checkpoint has.

    Args:
      num_merges: Merges of a checkpoint that is complete on disk.
    """
    with self._lock:
      covers = [n for n, start in self._starts.items() if start <= num_merges]
      if not covers:
        return
      for name in self._names():
        if name < max(covers):
          self._files.unlink(self._path(name))
          self._starts.pop(name, None)

  def entries(self, since: int = 0) -> Iterator[Entry]:
    """The commits that count, oldest first; the arrays may be kept.

    The first record of each file comes, too: its head has "format". What is
    damaged is left out, and comes to be in `damage` before what is after it.

    Args:
      since: Merges that need not come: files without a later one are not read.
    """
    self.damage = []
    chain = self._chain()
    while len(chain) > 1 and self._starts[chain[1][0]] <= since:
      del chain[0]
    for name, limit in chain:
      with self._path(name).open("rb") as file:
        for found in records.read(file, limit):
          if isinstance(found, records.Record):
            place = Place(*name, found.end)
            self.end = f"it ends at byte {found.end} of {self._path(name)}"
            yield Entry(found.head, found.arrays, place)
          elif found.is_torn:
            _log.warning(
              "%s ends in %d bytes of a commit that was never made; they are"
              " left out",
              self._path(name),
              file.seek(0, 2) - found.at,
            )
            self.end += ", where a record is cut short"
          else:
            self._note_damage(name, found)
    for name in self._names():
      if name.epoch == self.fenced:
        continue  # Nothing is in it yet.
      if not chain or name > chain[-1][0]:
        found = self._first(name)
        if isinstance(found, records.Fault) and not found.is_torn:
          self._note_damage(name, found)
        else:
          self.end += f"; {self._path(name)} is empty or cut short"

  def _note_damage(self, name: Name, fault: records.Fault) -> None:
    self.damage.append(f"{self._path(name)} is damaged at byte {fault.at}")

  def path(self, place: Place) -> pathlib.Path:
    """The file that a place is in."""
    return self._path(place.name)

  def close(self) -> None:
    if self._fd >= 0:
      self._files.close(self._fd)
      self._fd = -1

  def _chain(self) -> list[tuple[Name, int | None]]:
    """Files and how much of them counts, oldest first; notes their starts."""
    newest = self._newest()
    chain: list[tuple[Name, int | None]] = []
    limit: int | None = None
    while newest is not None:
      name, head = newest
      chain.append((name, limit))
      self._starts[name] = head["num_merges"]
      previous = Place(*head["previous"]) if head["previous"] else None
      newest = None
      if previous is not None:
        limit = previous.offset
        found = self._read_head(previous.name)
        if found is not None and found["run_id"] == head["run_id"]:
          newest = previous.name, found
        elif found is None and self._path(previous.name).exists():
          self._note_damage(previous.name, records.Fault(0, is_torn=False))
    return chain[::-1]

  def _newest(self) -> tuple[Name, dict[str, Any]] | None:
    """The newest file whose first record is whole: others never counted."""
    for name in sorted(self._names(), reverse=True):
      head = self._read_head(name)
      if head is not None:
        return name, head
    return None

  def _read_head(self, name: Name) -> dict[str, Any] | None:
    path = self._path(name)
    record = self._first(name)
    if not isinstance(record, records.Record):
      return None
    if record.head["format"] > FORMAT:
      raise ValueError(
        f"{path} has format {record.head['format']}, but this program reads up"
        f" to {FORMAT}: use the newer version that wrote it."
      )
    return record.head

  def _first(self, name: Name) -> records.Record | records.Fault | None:
    """What a file begins with; None if it is not there, or is empty."""
    if not self._path(name).exists():
      return None
    with self._path(name).open("rb") as file:
      return next(records.read(file), None)

  def _rotate(self) -> None:
    before = self._at
    fd, self._fd = self._fd, -1
    if fd >= 0:
      self._files.close(fd)
    # A number that an earlier try may have left behind is not used again.
    self._create(Name(before.epoch, self._last_number(before.epoch) + 1))
    self._write_head(before)

  def _last_number(self, epoch: int) -> int:
    return max(n.number for n in self._names() if n.epoch == epoch)

  def _create(self, name: Name) -> None:
    self._is_broken = True  # Until its first record is whole.
    self._fd = self._files.create(self._path(name))
    self._files.sync_directory(self.directory)
    self._name = name

  def _write_head(self, previous: Place | None) -> None:
    at = self._at
    self._at = Place(*self._name, 0)
    try:
      self._write(
        {
          "format": FORMAT,
          **self._head,
          "epoch": self._name.epoch,
          "previous": previous,
          "num_merges": self._num_merges,
        },
        (),
      )
    except BaseException:
      self._at = at
      raise
    self._starts[self._name] = self._num_merges
    self._is_fresh, self._is_broken = True, False

  def _write(self, head: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
    self._is_broken = True
    parts = records.encode(head, arrays)
    for part in parts:
      self._files.write(self._fd, part)
    self._files.sync(self._fd)
    end = self._at.offset + sum(len(part) for part in parts)
    self._at = self._at._replace(offset=end)
    self._is_broken = False

  def _names(self) -> list[Name]:
    if not self.directory.is_dir():
      return []
    found = []
    for path in self.directory.glob("*-*.log"):
      epoch, _, number = path.stem.partition("-")
      if all(x.isdecimal() and len(x) <= _DIGITS for x in (epoch, number)):
        found.append(Name(int(epoch), int(number)))
    return sorted(found)

  def _path(self, name: Name) -> pathlib.Path:
    return self.directory / f"{name.epoch}-{name.number}.log"
