"""PEM files, read so that every parser finds the same in them.

OpenSSL passes over a byte order mark or an odd line, gRPC's BoringSSL does not:
what is in the blocks is taken out and written anew. (docs/security.md)
"""

import base64
import binascii
import contextlib
import pathlib
import re
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

_BLOCK = re.compile(
  rb"-----BEGIN ([A-Z0-9 ]+)-----(.+?)-----END \1-----", re.DOTALL
)


class Block(NamedTuple):
  """What stands between BEGIN and END.

  Attributes:
    label: Such as "CERTIFICATE" or "EC PRIVATE KEY".
    der: Decoded.
  """

  label: str
  der: bytes


def read(setting: str, path: str, kind: str) -> list[Block]:
  """The blocks of a file whose label ends with `kind`.

  Args:
    setting: That names the file, for errors.

  Raises:
    ValueError: the file cannot be read, or has none.
  """
  data = None
  with contextlib.suppress(OSError):
    data = pathlib.Path(path).read_bytes()
  if data is None:
    raise ValueError(
      f"{setting}={path} cannot be read. It must be a PEM file that this user"
      " may read."
    )
  found = [(m[1].decode(), m[2]) for m in _BLOCK.finditer(data)]
  bodies = [(label, body) for label, body in found if label.endswith(kind)]
  try:
    blocks = [Block(label, _decode(body)) for label, body in bodies]
  except binascii.Error as error:
    raise ValueError(
      f"{setting}={path} is no {kind.lower()}: {error}. It must be a PEM file,"
      " without a password."
    ) from None
  if not blocks:
    raise ValueError(
      f"{setting}={path} is no {kind.lower()}: it has no line '-----BEGIN"
      f" {kind}-----' with its end. It must be a PEM file."
    )
  return blocks


def write(blocks: Iterable[Block]) -> bytes:
  """A PEM file's bytes."""
  return "".join(
    f"-----BEGIN {label}-----\n"
    + "\n".join(textwrap.wrap(base64.b64encode(der).decode(), 64))
    + f"\n-----END {label}-----\n"
    for label, der in blocks
  ).encode()


def _decode(body: bytes) -> bytes:
  return base64.b64decode(b"".join(body.split()), validate=True)
