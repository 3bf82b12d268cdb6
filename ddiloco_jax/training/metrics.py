"""Metrics files: one strict JSON object a line, appended and flushed at once.

A number that is not finite becomes null and is named under "not_finite", so
that every reader can parse every line and still sees what happened.
"""

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NOT_FINITE = "not_finite"
_log = logging.getLogger(__name__)


class MetricsWriter:
  """Appends lines to a file; any thread may write.

  A line that cannot be written is an error in the log, once until one can:
  nothing is trained, merged or restored by a metrics file.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Opens the file, makes its directory, and cuts off a torn last line."""
    self.path = Path(path)
    self.path.parent.mkdir(parents=True, exist_ok=True)
    _cut_torn_line(self.path)
    self._lock = threading.Lock()
    self._fails = False
    self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

  def write(self, values: Mapping[str, Any]) -> None:
    """Writes one line.

    Args:
      values: JSON values; device and numpy scalars are read (which waits for
        them), arrays become lists.

    Raises:
      ValueError: a value cannot be said in JSON.
    """
    line = strict_json(values)
    with self._lock, self._saying():
      self._file.write(line + "\n")
      self._file.flush()

  def close(self) -> None:
    with self._lock, self._saying():
      self._file.close()

  @contextlib.contextmanager
  def _saying(self) -> Iterator[None]:
    try:
      yield
    except OSError as error:
      if not self._fails:
        _log.error("cannot write %s, and goes on: %s", self.path, error)
      self._fails = True
    else:
      self._fails = False

  def __enter__(self) -> "MetricsWriter":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def strict_json(values: Mapping[str, Any]) -> str:
  """One line of JSON without NaN or infinity."""
  not_finite: list[str] = []
  plain = {
    name: _plain(name, value, not_finite) for name, value in values.items()
  }
  if not_finite:
    plain[NOT_FINITE] = not_finite
  return json.dumps(plain, allow_nan=False, separators=(",", ":"))


def read_metrics(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
  """Yields the complete lines of a metrics file; one being written is left."""
  with open(path, encoding="utf-8") as lines:
    for line in lines:
      if line.endswith("\n"):
        yield json.loads(line)


def _plain(name: str, value: Any, not_finite: list[str]) -> Any:
  if hasattr(value, "tolist"):
    value = value.tolist()
  if isinstance(value, float) and not math.isfinite(value):
    not_finite.append(name)
    return None
  if isinstance(value, Mapping):
    return {
      str(key): _plain(f"{name}.{key}", item, not_finite)
      for key, item in value.items()
    }
  if isinstance(value, list | tuple):
    return [
      _plain(f"{name}.{i}", item, not_finite) for i, item in enumerate(value)
    ]
  if value is None or isinstance(value, str | bool | int | float):
    return value
  raise ValueError(
    f"metric {name!r} is a {type(value).__name__}: it must be a number, a "
    "string, a boolean, None, or lists and mappings of these."
  )


def _cut_torn_line(path: Path) -> None:
  """A process killed while writing leaves half a line, which nobody can read."""
  if not path.exists():
    return
  with open(path, "rb+") as file:
    end = file.seek(0, os.SEEK_END)
    while end:
      start = max(0, end - 65536)
      file.seek(start)
      newline = file.read(end - start).rfind(b"\n")
      if newline >= 0:
        end = start + newline + 1
        break
      end = start
    file.truncate(end)
