"""scripts/make_certs.sh leaves what is there as it is, unless it has better."""

import pathlib
import shutil
import ssl
import subprocess
import sys

import pytest

from tests.support.secured import ROOT

SCRIPT = str(ROOT / "scripts/make_certs.sh")


def start(*words, env=None):
  return subprocess.Popen(
    ["bash", SCRIPT, *map(str, words)],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=env,
  )


def make(*words):
  """Exit code, and what was said."""
  process = start(*words)
  said, _ = process.communicate()
  return process.returncode, said


def contents(directory):
  return {path.name: path.read_bytes() for path in directory.iterdir()}


def check_pair(directory, name):
  """The certificate is of the key, and of the CA beside it."""
  pem, key = directory / f"{name}.pem", directory / f"{name}.key"
  ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(pem, key)
  subprocess.run(
    ["openssl", "verify", "-CAfile", directory / "ca.pem", pem],
    check=True,
    capture_output=True,
  )


@pytest.mark.parametrize(
  ("words", "says"),
  [
    (["--name=ca", "DIR"], "--name=ca is the CA's own"),
    (["--name=CA", "DIR"], "--name=CA is the CA's own"),
    (["--name=../evil", "DIR"], "--name=../evil cannot be a file's name"),
    (["--name=" + "x" * 65, "DIR"], "cannot be a file's name"),
    (["--name=", "DIR"], "--name= cannot be"),
    (["--days=x", "DIR"], "--days=x is no number of days"),
    (["--days=08", "DIR"], "--days=08 is no number of days"),
    (["--days=99999999", "DIR"], "between -3650 and 3650"),
    (["DIR", "node 1"], "HOST 'node 1' is no host"),
    (["DIR", "localhost", "10.0.0.999"], "HOST '10.0.0.999' is no host"),
    (["DIR", "1.2.3"], "HOST '1.2.3' is no host"),
    (["DIR", "1::2::3"], "HOST '1::2::3' is no host"),
    (["DIR", "x,DNS:y"], "HOST 'x,DNS:y' is no host"),
    ([""], "DIR is missing"),
  ],
)
def test_what_cannot_be_is_refused_by_name_before_anything_is_touched(
  tmp_path, words, says
):
  certs = tmp_path / "certs"
  make(certs)
  before = contents(certs)

  code, said = make(*(certs if word == "DIR" else word for word in words))

  assert code == 2
  assert says in said
  assert contents(certs) == before
  assert [path.name for path in tmp_path.iterdir()] == ["certs"]


def test_a_renewal_that_fails_leaves_the_pair_that_was_there(tmp_path):
  certs, other = tmp_path / "certs", tmp_path / "other"
  make(certs)
  make(other)
  (other / "ca.key").replace(certs / "ca.key")  # Signs for another CA.
  before = contents(certs)

  code, said = make(certs)

  assert code == 1
  assert f"what was in {certs} is as it was" in said
  assert contents(certs) == before


def test_a_renewal_replaces_the_pair_and_keeps_the_ca(tmp_path):
  make(tmp_path)
  before = contents(tmp_path)

  code, _ = make(tmp_path, "::1", "2001:db8::7", "*.example.org", "10.0.0.1")

  after = contents(tmp_path)
  check_pair(tmp_path, "node")
  assert code == 0
  assert before.keys() == after.keys()
  changed = {name for name in after if after[name] != before[name]}
  assert changed == {"node.pem", "node.key"}


def test_a_ca_that_lost_its_certificate_keeps_its_key(tmp_path):
  make(tmp_path)
  key = (tmp_path / "ca.key").read_bytes()
  (tmp_path / "ca.pem").unlink()

  code, _ = make("--name=other", tmp_path)

  assert code == 0
  assert (tmp_path / "ca.key").read_bytes() == key
  check_pair(tmp_path, "node")
  check_pair(tmp_path, "other")


def test_a_ca_without_its_key_is_named(tmp_path):
  make(tmp_path)
  (tmp_path / "ca.key").unlink()
  before = contents(tmp_path)

  code, said = make(tmp_path)

  assert code == 2
  assert "ca.key is not there" in said
  assert contents(tmp_path) == before


def test_many_at_once_share_one_new_ca(tmp_path):
  names = [f"n{i}" for i in range(6)]
  processes = [start(f"--name={name}", tmp_path) for name in names]
  for process in processes:
    process.communicate()

  assert [process.returncode for process in processes] == [0] * len(names)
  for name in names:
    check_pair(tmp_path, name)


def test_the_same_name_twice_at_once_gives_one_pair(tmp_path):
  processes = [start(tmp_path) for _ in range(4)]
  for process in processes:
    process.communicate()

  check_pair(tmp_path, "node")


def test_no_tool_of_linux_alone_is_needed(tmp_path):
  tools, certs = tmp_path / "bin", tmp_path / "certs"
  tools.mkdir()
  for name in ("bash", "cat", "mkdir", "mktemp", "mv", "openssl", "rm"):
    found = shutil.which(name)
    assert found
    (tools / name).symlink_to(pathlib.Path(found).resolve())
  (tools / "python3").symlink_to(sys.executable)
  (tools / "date").write_text("#!/bin/sh\nexit 1\n")  # BSD's has no -d.
  (tools / "date").chmod(0o755)
  env = {"PATH": str(tools)}

  processes = [start(certs, env=env) for _ in range(3)]
  said = [process.communicate()[0] for process in processes]

  assert [process.returncode for process in processes] == [0] * 3, said
  check_pair(certs, "node")
