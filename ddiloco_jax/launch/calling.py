"""How commands call a syncer: their flags, or what a run's record says."""

import argparse
import dataclasses
import json
import pathlib
import sys

from ddiloco_jax.launch import exits
from ddiloco_jax.learner.client import Client
from ddiloco_jax.wire import listening
from ddiloco_jax.wire.options import MAX_S, WireConfig
from ddiloco_jax.wire.status import ServiceError
from ddiloco_jax.wire.tokens import ONLOOKER

_FLAGS = {
  "tls_ca": "speak TLS with a syncer whose certificate this CA signed",
  "tls_cert": "certificate of this caller, where the syncer asks for one",
  "tls_key": "its key",
  "token_file": "tokens of learners (else $DDILOCO_TOKENS)",
  "admin_token_file": "tokens of admins (else $DDILOCO_ADMIN_TOKENS)",
}


def make_parser(name: str, about: str | None) -> argparse.ArgumentParser:
  """A parser of a command that calls the syncer at its first argument."""
  parser = argparse.ArgumentParser(
    prog=f"python -m ddiloco_jax.cli.{name}",
    description=about,
    epilog="exit codes:\n"
    + exits.table((exits.OK, exits.FAILED, exits.BAD_USAGE, exits.NO_SYNCER)),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument(
    "address", metavar="HOST:PORT", help="of the syncer: RUN/address has it"
  )
  return parser


def connect(
  parser: argparse.ArgumentParser, flags: argparse.Namespace, timeout_s: float
) -> Client:
  """A client of the syncer that flags name; ends the process if they cannot."""
  if not 0.1 <= timeout_s <= MAX_S:
    parser.error(
      f"--timeout_s is {timeout_s:g}: it must be in 0.1..{MAX_S:.0f} s."
    )
  try:
    listening.parse_address(flags.address)
    return Client(
      flags.address, wire_config(flags, timeout_s), learner=ONLOOKER
    )
  except ValueError as error:
    parser.error(str(error))


def failed(error: ServiceError, address: str) -> int:
  """Says on stderr why a call failed; returns the exit code."""
  print(f"error: {error}", file=sys.stderr)
  if not error.is_worth_retrying:
    return exits.FAILED
  print(
    f"No syncer serves a run at {address}. Is it running, and is that what its"
    " RUN/address says?",
    file=sys.stderr,
  )
  return exits.NO_SYNCER


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds those of WireConfig that name files."""
  for name, text in _FLAGS.items():
    parser.add_argument(f"--{name}", default="", metavar="FILE", help=text)


def wire_config(flags: argparse.Namespace, timeout_s: float) -> WireConfig:
  """The settings that flags say, for calls of at most so long.

  Raises:
    ValueError: they cannot be.
  """
  files = {name: getattr(flags, name) for name in _FLAGS}
  return WireConfig(call_timeout_s=timeout_s, **files)


def recorded(run_dir: pathlib.Path, timeout_s: float) -> WireConfig:
  """The settings with which a run's syncer serves, for a call on its machine.

  Raises:
    ValueError: they cannot be.
  """
  record = json.loads((run_dir / "config.json").read_text("utf-8"))
  known = {field.name for field in dataclasses.fields(WireConfig)}
  wire = {k: v for k, v in record["wire"].items() if k in known}
  return dataclasses.replace(WireConfig(**wire), call_timeout_s=timeout_s)
