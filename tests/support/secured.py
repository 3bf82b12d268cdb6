"""Certificates of a test CA, made by scripts/make_certs.sh, and tokens."""

import dataclasses
import functools
import pathlib
import subprocess
import tempfile
from typing import Any

from ddiloco_jax.wire.options import WireConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEARNER_TOKEN = "a-token-of-any-learner-0123456789"
ADMIN_TOKEN = "a-token-of-the-admins-0123456789"


@functools.cache
def _directory() -> tempfile.TemporaryDirectory:
  """Removed when the process ends."""
  return tempfile.TemporaryDirectory(prefix="certs")


@functools.cache
def certs(
  name: str = "node",
  ca: str = "ca",
  days: int = 2,
  hosts: tuple[str, ...] = ("localhost", "127.0.0.1"),
) -> dict[str, str]:
  """Settings tls_cert, tls_key and tls_ca of a certificate made for a test."""
  directory = pathlib.Path(_directory().name) / ca
  subprocess.run(
    [
      "bash",
      str(ROOT / "scripts/make_certs.sh"),
      f"--days={days}",
      f"--name={name}",
      str(directory),
      *hosts,
    ],
    check=True,
    capture_output=True,
  )
  return {
    "tls_cert": str(directory / f"{name}.pem"),
    "tls_key": str(directory / f"{name}.key"),
    "tls_ca": str(directory / "ca.pem"),
  }


def token_file(*lines: str) -> str:
  """The path of a file that has these lines."""
  with tempfile.NamedTemporaryFile(
    "w", dir=_directory().name, delete=False
  ) as file:
    file.write("\n".join(lines) + "\n")
  return file.name


@functools.cache
def shared_tokens() -> dict[str, str]:
  """Settings of one token for learners and another for admins."""
  return {
    "token_file": token_file(LEARNER_TOKEN),
    "admin_token_file": token_file(ADMIN_TOKEN),
  }


def secured(cfg: WireConfig, **changes: Any) -> WireConfig:
  """Mutual TLS and tokens, on top of other settings."""
  settings = {**certs(), "require_client_cert": True, **shared_tokens()}
  return dataclasses.replace(cfg, **{**settings, **changes})
