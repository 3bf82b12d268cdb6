"""Names a directory's files by their contents, once it is whole.

Orbax tells that a checkpoint was finished, and not that a byte of it has
changed since. The seal is written last: what has none is no whole part of a
cut. (arXiv 2604.21428, App. E.)
"""

import json
import os
import pathlib

import xxhash

NAME = "seal.json"
_CHUNK_BYTES = 1 << 20


def seal(directory: pathlib.Path) -> None:
  """Writes the seal of a directory that nobody changes any more.

  Raises:
    OSError: it could not be written.
  """
  path = directory / NAME
  part = path.with_suffix(".part")
  with part.open("w", encoding="utf-8") as file:
    names = _names(directory)
    json.dump(names, file, indent=1, sort_keys=True, allow_nan=False)
    file.flush()
    os.fsync(file.fileno())
  part.rename(path)


def check(directory: pathlib.Path) -> None:
  """Refuses what is not whole, or is not what was sealed.

  Raises:
    ValueError: names the file.
  """
  path = directory / NAME
  fix = "Take another snapshot, or bring this one back from a copy."
  if not path.exists():
    raise ValueError(
      f"{directory} is no whole part of a snapshot: it has no {NAME}, which is"
      f" written last. {fix}"
    )
  try:
    wanted = dict(json.loads(path.read_text("utf-8")))
  except (ValueError, TypeError) as error:
    raise ValueError(f"{path} is damaged: {error}. {fix}") from None
  found = _names(directory)
  for name in sorted(wanted):  # What else lies there, nobody reads.
    if wanted[name] != found.get(name):
      word = "damaged" if name in found else "missing"
      raise ValueError(f"{directory / name} is {word}. {fix}")


def _names(directory: pathlib.Path) -> dict[str, str]:
  """File, relative -> digest of its bytes."""
  own = {NAME, pathlib.Path(NAME).with_suffix(".part").name}
  return {
    path.relative_to(directory).as_posix(): _digest(path)
    for path in sorted(directory.rglob("*"))
    if path.is_file() and path.name not in own
  }


def _digest(path: pathlib.Path) -> str:
  found = xxhash.xxh3_128()
  with path.open("rb") as file:
    while chunk := file.read(_CHUNK_BYTES):
      found.update(chunk)
  return found.hexdigest()
