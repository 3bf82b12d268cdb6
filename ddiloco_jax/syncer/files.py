"""The file operations that a run's durable state is made of.

One small object that the store and its journal are given, so that a test can
end the process in any of them.
"""

import os
import pathlib
from typing import Protocol

Path = pathlib.Path


class Files(Protocol):
  """What the store does to files; every operation may be its last."""

  def create(self, path: Path) -> int:
    """A new file, open for writing; FileExistsError if there is one."""
    ...

  def write(self, fd: int, data: memoryview) -> None: ...

  def sync(self, fd: int) -> None:
    """Returns when what was written is on disk."""
    ...

  def close(self, fd: int) -> None: ...

  def rename(self, old: Path, new: Path) -> None: ...

  def unlink(self, path: Path) -> None: ...

  def sync_directory(self, path: Path) -> None:
    """Returns when the names in a directory are on disk."""
    ...


class OsFiles:
  """The operating system's."""

  def create(self, path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

  def write(self, fd: int, data: memoryview) -> None:
    while data:
      data = data[os.write(fd, data) :]

  def sync(self, fd: int) -> None:
    os.fdatasync(fd)

  def close(self, fd: int) -> None:
    os.close(fd)

  def rename(self, old: Path, new: Path) -> None:
    old.rename(new)

  def unlink(self, path: Path) -> None:
    path.unlink()

  def sync_directory(self, path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
      os.fsync(fd)
    finally:
      os.close(fd)
