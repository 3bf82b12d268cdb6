"""Documents from the standard library's text, .txt, .jsonl and ArrayRecord.

Documents come in one order on every machine, and whether a document is held
out depends on its content alone. (arXiv 2604.21428, Sec. 5.)
"""

import dataclasses
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

STDLIB = "stdlib"
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "idle_test"}
_SUFFIXES = (".txt", ".jsonl", ".array_record", ".arrayrecord")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
  """Where text comes from and how it becomes tokens.

  Attributes:
    source: "stdlib" (the running interpreter's own *.py files), or globs of
      .txt, .jsonl or ArrayRecord files; several are separated by commas.
    field: The field of a .jsonl line that holds its text.
    tokenizer: "bytes", or a path to a tokenizers .json or a sentencepiece
      .model file.
    max_bytes: Text is held in memory; what lies beyond this is not read.
    piece_bytes: A .txt file is cut into documents of about this size, at line
      ends, so that a single file can be split into training and held-out text.
    held_out_every: One document in so many is held out, and never trained on.
    num_epochs: Passes over a shard before it is exhausted; None: endless.
  """

  source: str = STDLIB
  field: str = "text"
  tokenizer: str = "bytes"
  max_bytes: int = 16 << 20
  piece_bytes: int = 16 << 10
  held_out_every: int = 20
  num_epochs: int | None = None

  def __post_init__(self):
    for name in ("max_bytes", "piece_bytes"):
      _check(self, name, getattr(self, name) >= 1, "at least 1")
    _check(self, "held_out_every", self.held_out_every >= 2, "at least 2")
    is_some = self.num_epochs is None or self.num_epochs >= 1
    _check(self, "num_epochs", is_some, "at least 1, or None")


def read_documents(cfg: DataConfig) -> list[bytes]:
  """The documents of a source, UTF-8, in a fixed order.

  Args:
    cfg: `source`, `field`, `max_bytes` and `piece_bytes` are used.

  Returns:
    Non-empty documents, sorted by path, then by place in the file; together
    at most `max_bytes` long (the document that passes the limit is left out).

  Raises:
    ValueError: a path or glob that matches nothing, a suffix that is not
      known, a line that is not JSON or lacks the field, or no text at all.
  """
  documents, num_bytes = [], 0
  for document in _documents(cfg):
    num_bytes += len(document)
    if num_bytes > cfg.max_bytes:
      break
    if document:
      documents.append(document)
  if not documents:
    raise ValueError(
      f"data.source={cfg.source!r} gives no document within "
      f"data.max_bytes={cfg.max_bytes}; a run needs text: name files that are "
      "not empty, or raise data.max_bytes."
    )
  return documents


def split_held_out(
  documents: Sequence[bytes], every: int
) -> tuple[list[bytes], list[bytes]]:
  """Splits documents by the hash of their content.

  Equal documents lie on one side, so held-out text is never trained on.

  Args:
    documents: In any order, which both parts keep.
    every: One document in `every` is held out, at least one.

  Returns:
    Training documents and held-out documents, both non-empty.

  Raises:
    ValueError: fewer than two different documents, or `every` below 2.
  """
  hashes = [hashlib.sha256(document).digest() for document in documents]
  distinct = sorted(set(hashes))
  if every < 2 or len(distinct) < 2:
    raise ValueError(
      f"data.held_out_every={every} over {len(distinct)} different documents "
      "leaves nothing to train on or nothing to hold out; it must be at least "
      "2, over at least 2 documents: give more files, or lower "
      "data.piece_bytes for a single .txt file."
    )
  held_out = set(distinct[: -(-len(distinct) // every)])
  training, evaluation = [], []
  for digest, document in zip(hashes, documents, strict=True):
    (evaluation if digest in held_out else training).append(document)
  return training, evaluation


def digest(documents: Sequence[bytes]) -> str:
  """SHA-256 of the documents in order, for the run's record."""
  total = hashlib.sha256()
  for document in documents:
    total.update(len(document).to_bytes(8, "little"))
    total.update(document)
  return total.hexdigest()


def _documents(cfg: DataConfig) -> Iterator[bytes]:
  for item in cfg.source.split(","):
    item = item.strip()
    if item == STDLIB:
      yield from _stdlib()
      continue
    paths = sorted(
      p for p in glob.glob(item, recursive=True) if os.path.isfile(p)
    )
    if not paths:
      raise ValueError(
        f"data.source: {item!r} matches no file (working directory "
        f"{os.getcwd()!r}); it must be {STDLIB!r}, or a path or glob of "
        f"{', '.join(_SUFFIXES)} files: correct --config.data.source."
      )
    for path in paths:
      yield from _file(path, cfg)


def _stdlib() -> Iterator[bytes]:
  root = Path(sysconfig.get_paths()["stdlib"])
  paths = []
  for folder, folders, names in os.walk(root):
    folders[:] = [
      name
      for name in folders
      if name not in _SKIPPED and not name.startswith("test")
    ]
    paths += [Path(folder, name) for name in names if name.endswith(".py")]
  if not paths:
    raise ValueError(
      f"data.source={STDLIB!r}: no *.py file under {str(root)!r}; this "
      "interpreter's library is not on disk as text: set "
      "--config.data.source to files of your own."
    )
  for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
    yield path.read_bytes()


def _file(path: str, cfg: DataConfig) -> Iterator[bytes]:
  suffix = Path(path).suffix
  if suffix == ".txt":
    yield from _pieces(path, cfg.piece_bytes)
  elif suffix == ".jsonl":
    yield from _json_lines(path, cfg.field)
  elif suffix in (".array_record", ".arrayrecord"):
    yield from _records(path)
  else:
    raise ValueError(
      f"data.source: {path!r} has the suffix {suffix!r}; known are "
      f"{', '.join(_SUFFIXES)}: rename or convert the file."
    )


def _pieces(path: str, piece_bytes: int) -> Iterator[bytes]:
  lines, num_bytes = [], 0
  with open(path, "rb") as file:
    for line in file:
      lines.append(line)
      num_bytes += len(line)
      if num_bytes >= piece_bytes:
        yield b"".join(lines)
        lines, num_bytes = [], 0
  yield b"".join(lines)


def _json_lines(path: str, field: str) -> Iterator[bytes]:
  with open(path, "rb") as file:
    for number, line in enumerate(file, 1):
      if line.strip():
        yield _field(line, field, f"{path}:{number}")


def _field(line: bytes, field: str, place: str) -> bytes:
  try:
    record = json.loads(line)
  except ValueError as error:
    raise ValueError(
      f"{place}: {line[:60]!r} is not JSON ({error}); each line of a .jsonl "
      "file must be one JSON object: mend or remove the line."
    ) from error
  text = record.get(field) if isinstance(record, dict) else None
  if not isinstance(text, str):
    there = sorted(record) if isinstance(record, dict) else type(record)
    raise ValueError(
      f"{place}: no text in field {field!r} (the line has {there}); each "
      "object must hold its text as a string there: set --config.data.field."
    )
  return text.encode()


def _records(path: str) -> Iterator[bytes]:
  import grain  # Deferred: costs seconds, and only this source needs it here.

  records: Any = grain.sources.ArrayRecordDataSource([path])
  for index in range(len(records)):
    yield records[index]


def _check(cfg: DataConfig, name: str, holds: bool, rule: str) -> None:
  if not holds:
    raise ValueError(
      f"data.{name} is {getattr(cfg, name)!r}: it must be {rule}."
    )
