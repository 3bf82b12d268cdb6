"""The bytes behind a tape: what was merged, as it was received.

RUN/payloads holds, per epoch, EPOCH-start.npz (the tensors that the epoch began
with) and EPOCH-N.bin: replies in the order of their merges, each a line of JSON
that names it and then its bytes in wire format. A merge is written before its
version is published, by the merge worker; nothing is ever deleted here.
(arXiv 2604.21428, App.)
"""

import errno
import json
import logging
import os
import pathlib
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.lines import dump
from ddiloco_jax.syncer.inbox import Reply

_log = logging.getLogger(__name__)
_FILE_BYTES = 1 << 30
# What is left to checkpoints, tapes and logs, which matter more.
_RESERVE_BYTES = 256 << 20
# What the readers of zip and of numpy raise for damage, as it falls.
_UNREADABLE = (
  OSError,
  EOFError,
  LookupError,
  RuntimeError,
  ValueError,
  OverflowError,
  struct.error,
  zipfile.BadZipFile,
  zlib.error,
)


class DamagedPayload(ValueError):
  """A payload file that cannot be read: what is wrong with it, and where."""


class PayloadWriter:
  """Writes the payloads of one epoch.

  A full disk, or one that fails, ends the recording and not the run: it is
  logged, told to `stopped`, and a replay names the first merge that it lacks.

  Args:
    directory: Of the run's payloads; made if missing.
    epoch: Of this start of the syncer.
    start: Arrays that the epoch begins with, by any names.
    stopped: Told why the recording ended, if it did before `close`.
    num_free: Bytes that the disk of a path has left.
    file_bytes: A file that has so many is followed by another.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    epoch: int,
    start: Mapping[str, np.ndarray],
    stopped: Callable[[str], object] = lambda reason: None,
    num_free: Callable[[pathlib.Path], int] = lambda x: (
      shutil.disk_usage(x).free
    ),
    file_bytes: int = _FILE_BYTES,
  ):
    self._directory = directory
    self._epoch = epoch
    self._stopped = stopped
    self._num_free = num_free
    self._file_bytes = file_bytes
    self._file = None
    self._num_files = 0
    self._is_over = False
    try:
      self._write_start(start)
    except OSError as error:
      self._stop(f"the start of epoch {epoch}", error)

  def _write_start(self, start: Mapping[str, np.ndarray]) -> None:
    self._directory.mkdir(parents=True, exist_ok=True)
    self._check_room(sum(array.nbytes for array in start.values()))
    part = self._directory / f"{self._epoch}-start.part"
    with part.open("wb") as file:
      np.savez(file, **start)  # pyright: ignore[reportArgumentType]
      file.flush()
      os.fsync(file.fileno())
    part.rename(_start_path(self._directory, self._epoch))

  def write(self, effect: events.Merge, replies: Sequence[Reply]) -> None:
    """Appends the replies of a merge, in its order."""
    if self._is_over:
      return
    try:
      self._check_room(sum(len(reply.data) for reply in replies))
      file = self._open()
      for item, reply in zip(effect.inputs, replies):
        head = {
          "reply": list(item.key),
          "n": effect.version.n,
          "format": reply.format,
          "num_bytes": len(reply.data),
          "crc32": zlib.crc32(reply.data),
        }
        file.write(dump(head).encode() + b"\n")
        file.write(reply.data)
      file.flush()  # A killed syncer has lost nothing that it published.
    except OSError as error:
      version = f"version {effect.version.n} of fragment {effect.fragment}"
      self._stop(version, error)

  def close(self) -> None:
    """Ends the newest file."""
    self._is_over = True
    if self._file is not None:
      self._file.close()
      self._file = None

  def _open(self):
    if self._file is not None and self._file.tell() >= self._file_bytes:
      self._file.close()
      self._file = None
    if self._file is None:
      name = f"{self._epoch}-{self._num_files}.bin"
      self._file = (self._directory / name).open("xb")
      self._num_files += 1
    return self._file

  def _check_room(self, num_bytes: int) -> None:
    free = self._num_free(self._directory)
    if free < num_bytes + _RESERVE_BYTES:
      raise OSError(
        errno.ENOSPC,
        f"{free} bytes are left, and recording {num_bytes} more would leave"
        f" less than {_RESERVE_BYTES} to the run's checkpoints",
        str(self._directory),
      )

  def _stop(self, since: str, error: OSError) -> None:
    reason = (
      f"payloads are recorded no more, from {since} on: {error}. The run goes"
      " on; free space and restart the syncer with --restore to record again."
    )
    _log.error("%s", reason)
    try:
      self.close()
    except OSError:
      self._file = None  # What it had buffered is lost with the rest.
    self._stopped(reason)


class Recorded(NamedTuple):
  """A reply as it was received."""

  format: str
  data: bytes


class PayloadReader:
  """Finds the recorded replies of one epoch by their names.

  Args:
    directory: Of the run's payloads.

  Raises:
    DamagedPayload: a file has something else than replies before its end.
  """

  def __init__(self, directory: pathlib.Path, epoch: int):
    self._directory = directory
    self._epoch = epoch
    self._places: dict[events.ReplyKey, tuple[pathlib.Path, int, Any]] = {}
    for path in _files(directory, epoch):
      for key, offset, head in _scan(path):
        self._places[key] = path, offset, head

  @property
  def has_start(self) -> bool:
    """Whether this epoch was recorded."""
    return _start_path(self._directory, self._epoch).exists()

  def start(self) -> dict[str, np.ndarray]:
    """The arrays that the epoch began with.

    Raises:
      DamagedPayload: they cannot be read.
    """
    path = _start_path(self._directory, self._epoch)
    try:
      return read_npz(path)
    except ValueError as error:
      raise DamagedPayload(
        f"{path} cannot be read: {error}; take another copy of the file"
      ) from error

  def get(self, key: events.ReplyKey) -> Recorded | None:
    """A reply; None if it was not recorded.

    Raises:
      DamagedPayload: its bytes are not those that were written.
    """
    if key not in self._places:
      return None
    path, offset, head = self._places[key]
    with path.open("rb") as file:
      file.seek(offset)
      data = file.read(head["num_bytes"])
    if zlib.crc32(data) != head["crc32"]:
      raise DamagedPayload(
        f"{path}, byte {offset}: the bytes of {key} have not the checksum that"
        " was written with them; take another copy of the file"
      )
    return Recorded(head["format"], data)


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """The arrays of an .npz file by their names.

  Raises:
    ValueError: they cannot be read, whatever is wrong with the file.
  """
  try:
    with zipfile.ZipFile(path) as archive:
      fault = archive.testzip()  # A flipped bit would be a parameter.
    if fault:
      raise ValueError(f"{fault} has a wrong checksum")
    with np.load(path, allow_pickle=False) as loaded:
      return {name: loaded[name] for name in loaded.files}
  except _UNREADABLE as error:
    raise ValueError(str(error) or type(error).__name__) from error


def recorded_epochs(directory: pathlib.Path) -> set[int]:
  """The epochs that a run's payloads have files of."""
  names = (path.name for path in directory.glob("*-*"))
  found = (name.partition("-") for name in names)
  return {
    int(epoch)
    for epoch, _, rest in found
    if epoch.isdecimal() and rest.endswith((".npz", ".bin"))
  }


def _start_path(directory: pathlib.Path, epoch: int) -> pathlib.Path:
  return directory / f"{epoch}-start.npz"


def _files(directory: pathlib.Path, epoch: int) -> Iterator[pathlib.Path]:
  number = 0
  while (path := directory / f"{epoch}-{number}.bin").exists():
    yield path
    number += 1


def _scan(
  path: pathlib.Path,
) -> Iterator[tuple[events.ReplyKey, int, dict[str, Any]]]:
  """Names and places; a torn end is what a killed syncer left, and ends it."""
  size = path.stat().st_size
  with path.open("rb") as file:
    while line := file.readline(1 << 16):
      at = file.tell()
      if not line.endswith(b"\n") and at == size:
        return
      try:
        head = json.loads(line)
        key = events.ReplyKey(*head["reply"])
        end = at + head["num_bytes"]
        assert isinstance(head["crc32"], int)
        assert isinstance(head["format"], str)
      except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise DamagedPayload(
          f"{path}, byte {at - len(line)}: no reply begins there ({error!r});"
          " take another copy of the file"
        ) from error
      if end > size:
        return
      yield key, at, head
      file.seek(end)
