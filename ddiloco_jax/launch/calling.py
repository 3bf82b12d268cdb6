"""How commands call a syncer: their flags, or what a run's record says."""

import argparse
import dataclasses
import json
import pathlib

from ddiloco_jax.wire.options import WireConfig

_FLAGS = {
  "tls_ca": "speak TLS with a syncer whose certificate this CA signed",
  "tls_cert": "certificate of this caller, where the syncer asks for one",
  "tls_key": "its key",
  "token_file": "tokens of learners (else $DDILOCO_TOKENS)",
  "admin_token_file": "tokens of admins (else $DDILOCO_ADMIN_TOKENS)",
}


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
