"""Who gets in: TLS, tokens, and what is said to those who do not. (T10)"""

import contextlib
import dataclasses
import pathlib
import socket
import ssl
import struct
import subprocess
import threading
import time

import grpc
import numpy as np
import pytest

from ddiloco_jax.learner.client import Client
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.syncer.server import Server
from ddiloco_jax.wire import methods, port, tls
from ddiloco_jax.wire import tokens as wire_tokens
from ddiloco_jax.wire.options import WireConfig
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError
from ddiloco_jax.wire.tokens import ONLOOKER
from tests.support.proxy import Proxy
from tests.support.secured import (
  ADMIN_TOKEN,
  LEARNER_TOKEN,
  certs,
  secured,
  shared_tokens,
  token_file,
)
from tests.support.served import Served, wait_for

RULES = Rules(
  num_fragments=1, cycle_steps=2, max_open_rounds=1, quorum=1, lease_s=30.0
)
THETA = {"w": np.zeros(4, np.float32)}
WIRE = WireConfig(call_timeout_s=5.0, reconnect_max_s=0.5)
OTHER_TOKEN = "a-token-that-nobody-knows-0123456789"


@pytest.fixture
def serve():
  runs = []

  def start(cfg: WireConfig) -> Served:
    run = Served(THETA, RULES, "in_process", cfg=cfg)
    run._server = Server("127.0.0.1:0", cfg)
    run._server.serve(run.syncer)
    run.address = run._server.address
    runs.append(run)
    return run

  yield start
  for run in runs:
    run.close()


def fault(address: str, cfg: WireConfig, learner: str = "0"):
  """What a learner is told that may not get in."""
  client = Client(address, cfg, learner=learner)
  try:
    with pytest.raises(ServiceError) as caught:
      client.get_run()
  finally:
    client.close()
  return caught.value


def without(cfg: WireConfig, *names: str) -> WireConfig:
  return dataclasses.replace(cfg, **dict.fromkeys(names, ""))


def mutual(**changes) -> WireConfig:
  return secured(WIRE, **changes)


CAUSES = {
  "wrong token": (
    {},
    lambda: mutual(token_file=token_file(OTHER_TOKEN)),
    "wrong token",
  ),
  "no token": (
    {},
    lambda: without(mutual(), "token_file", "admin_token_file"),
    "no token was sent",
  ),
  "expired certificate": (
    lambda: certs("old", days=-1),
    mutual,
    "has expired",
  ),
  "wrong CA": (
    {},
    lambda: mutual(tls_ca=certs(ca="other")["tls_ca"]),
    "not signed by the CA",
  ),
  "wrong host name": (
    lambda: certs("elsewhere", hosts=("example.org",)),
    mutual,
    "is not for host '127.0.0.1'",
  ),
  "no certificate": (
    {},
    lambda: dataclasses.replace(
      mutual(), require_client_cert=False, tls_cert="", tls_key=""
    ),
    "asks for a certificate",
  ),
  "foreign certificate": (
    {},
    lambda: mutual(
      tls_cert=certs(ca="other")["tls_cert"],
      tls_key=certs(ca="other")["tls_key"],
    ),
    "does not take this process's certificate",
  ),
  "no TLS": (
    {},
    lambda: WireConfig(call_timeout_s=5.0, **shared_tokens()),
    "speaks TLS, and this process does not",
  ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_its_own_message_and_no_tensor_is_sent(serve, cause):
  of_syncer, of_learner, says = CAUSES[cause]
  of_syncer = of_syncer() if callable(of_syncer) else of_syncer
  run = serve(mutual(**of_syncer))
  proxy = Proxy(run.address)

  error = fault(proxy.address, of_learner())
  proxy.close()

  assert error.code == "UNAUTHENTICATED"
  assert says in error.text
  others = (other for _, _, other in CAUSES.values() if other != says)
  assert not any(other in error.text for other in others)
  assert 0 < proxy.bytes_up < 30_000  # Handshakes; nothing was offered to send.
  assert not run.events
  assert OTHER_TOKEN not in str(error)


def test_tls_towards_a_plaintext_syncer_is_named(serve):
  run = serve(WIRE)

  assert "does not speak TLS" in fault(run.address, mutual()).text


def test_who_has_certificate_and_token_gets_in(serve):
  run = serve(mutual())
  client = Client(run.address, mutual(), learner="0")

  assert client.get_run() == run.syncer.get_run()
  client.close()


@pytest.mark.parametrize("name", ["Drain", "TakeSnapshot", "Evict"])
def test_admin_calls_are_denied_to_learners(serve, name):
  run = serve(mutual())
  request = getattr(pb, f"{name}Request")()
  client = Client(run.address, mutual(), learner="0")

  with pytest.raises(ServiceError, match="learner's token") as caught:
    client._ask(name, request, 0)
  client.close()

  assert caught.value.code == "PERMISSION_DENIED"
  assert run.syncer.wait(0.0) is None


def test_an_admin_drains_and_may_not_join(serve):
  run = serve(mutual())
  admin = Client(run.address, mutual(), learner=ONLOOKER)
  hello = port.Hello(learner="0", nonce="n", layout_digest=run.layout.digest())

  with pytest.raises(ServiceError, match="admin's token") as caught:
    next(admin.join(hello).notices())
  admin.status()
  admin.drain("enough")

  assert caught.value.code == "PERMISSION_DENIED"
  assert run.syncer.wait(10.0)
  admin.close()


def test_admin_calls_without_tokens_are_for_loopback_only():
  tokens = wire_tokens.Tokens()
  method = next(iter(wire_tokens.ADMIN_METHODS))

  wire_tokens.Gate(tokens, is_local=True)._check(method, ())
  with pytest.raises(ServiceError, match="admin_token_file") as caught:
    wire_tokens.Gate(tokens, is_local=False)._check(method, ())

  assert caught.value.code == "PERMISSION_DENIED"


def test_the_admin_methods_are_those_of_the_service():
  names = {m.full_name for m in methods.SERVICE.methods}

  for method in wire_tokens.ADMIN_METHODS:
    assert method[1:].replace("/", ".") in names


def test_a_bound_token_is_good_for_its_id_only(serve):
  bound = token_file(f"ada {LEARNER_TOKEN}", f"bob {OTHER_TOKEN}")
  run = serve(WireConfig(token_file=bound))
  hello = port.Hello(
    learner="bob", nonce="n", layout_digest=run.layout.digest()
  )
  client = Client(run.address, WireConfig(token_file=bound), learner="ada")

  with pytest.raises(ServiceError, match="bound to another id") as caught:
    next(client.join(hello).notices())
  ada = dataclasses.replace(hello, learner="ada")
  stream = client.join(ada)
  _, welcome = next(stream.notices())
  stream.close()
  client.close()

  assert caught.value.code == "UNAUTHENTICATED"
  assert isinstance(welcome, port.Welcomed)


def test_an_id_that_has_a_token_is_for_no_token_of_any_id(serve):
  run = serve(WireConfig(token_file=token_file(f"ada {OTHER_TOKEN}", "T" * 20)))
  cfg = WireConfig(token_file=token_file("T" * 20))
  hello = port.Hello(
    learner="ada", nonce="n", layout_digest=run.layout.digest()
  )
  client = Client(run.address, cfg, learner="ada")

  with pytest.raises(ServiceError, match="a token of its own") as caught:
    next(client.join(hello).notices())
  stream = client.join(dataclasses.replace(hello, learner="bob"))
  _, welcome = next(stream.notices())
  stream.close()
  client.close()

  assert caught.value.code == "UNAUTHENTICATED"
  assert isinstance(welcome, port.Welcomed)


def test_health_and_reflection_ask_for_no_token(serve):
  from grpc_health.v1 import health_pb2, health_pb2_grpc

  run = serve(WireConfig(**shared_tokens()))
  with grpc.insecure_channel(run.address) as channel:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=10.0)

  assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("insecure", [False, True])
def test_tokens_off_loopback_without_tls_do_not_start(insecure):
  cfg = WireConfig(insecure=insecure, **shared_tokens())

  with pytest.raises(ValueError, match=r"without TLS.*wire\.insecure"):
    Server("0.0.0.0:0", cfg)
  with pytest.raises(ValueError, match=r"without TLS.*wire\.insecure"):
    Client("192.0.2.1:8470", cfg, learner="0")


def test_plaintext_off_loopback_needs_insecure_and_tls_does_not():
  with pytest.raises(ValueError, match=r"wire\.insecure"):
    Server("0.0.0.0:0", WireConfig())

  Server("0.0.0.0:0", WireConfig(insecure=True)).stop(0.0)
  Server("0.0.0.0:0", mutual()).stop(0.0)


@pytest.mark.parametrize(
  ("lines", "says"),
  [
    (("short",), "line 1 .* 5 characters"),
    ((LEARNER_TOKEN, f"a b {LEARNER_TOKEN}"), "line 2 .* 3 words"),
    (("# nothing",), "has no token"),
    ((f"ada {LEARNER_TOKEN}",), "no line for learner '0'"),
    ((OTHER_TOKEN, ADMIN_TOKEN), "line 2 of .* and line 1 of .* same token"),
    ((f"ada {LEARNER_TOKEN}", f"bob {LEARNER_TOKEN}"), "line 1 .* line 2 .*"),
    ((LEARNER_TOKEN, f"ada {LEARNER_TOKEN}"), "line 1 .* line 2 .* same token"),
    ((f"ada {LEARNER_TOKEN}",) * 2, "line 1 .* line 2 .* same token"),
    (("", f"{LEARNER_TOKEN} ada"), "line 2 .* 3 characters"),
    ((f"{LEARNER_TOKEN}!! {OTHER_TOKEN}",), "line 1 .* no learner's id"),
    ((f"ada\v{LEARNER_TOKEN}",), "line 1 .* printable ASCII"),
    ((f"ada {LEARNER_TOKEN}\x00b",), "line 1 .* printable ASCII"),
    ((f"{LEARNER_TOKEN}\x1c{OTHER_TOKEN}",), "line 1 .* printable ASCII"),
    ((f"{LEARNER_TOKEN}\x7f",), "line 1 .* printable ASCII"),
    ((f"{LEARNER_TOKEN}é",), "line 1 .* printable ASCII"),
    ((f"{LEARNER_TOKEN}#old",), "line 1 .* none a '#'"),
    (("x" * 1025,), "line 1 .* 1025 characters; it must have 16 to 1024"),
  ],
)
def test_a_token_file_that_cannot_be_names_the_line_and_no_token(lines, says):
  cfg = WireConfig(
    token_file=token_file(*lines), admin_token_file=token_file(ADMIN_TOKEN)
  )

  with pytest.raises(ValueError, match=says) as caught:
    wire_tokens.read_tokens(cfg).of_learner("0")

  assert "0123456789" not in str(caught.value)


def test_an_admins_line_is_a_token_only():
  cfg = WireConfig(admin_token_file=token_file("", f"ada {ADMIN_TOKEN}"))

  with pytest.raises(ValueError, match=r"line 2 of .* nothing else"):
    wire_tokens.read_tokens(cfg)


@pytest.mark.parametrize(
  "text",
  [
    f"\ufeffada {LEARNER_TOKEN}\n{OTHER_TOKEN}\n",
    f"ada {LEARNER_TOKEN}\r\n{OTHER_TOKEN}\r\n",
    f"# since May\n\n  ada\t{LEARNER_TOKEN}  # hers\n{OTHER_TOKEN}",
  ],
)
def test_what_editors_and_people_add_is_no_part_of_a_token(tmp_path, text):
  (tmp_path / "tokens").write_bytes(text.encode())
  cfg = WireConfig(token_file=str(tmp_path / "tokens"))

  assert wire_tokens.read_tokens(cfg, {}).learners == (
    wire_tokens.Token(LEARNER_TOKEN, "ada"),
    wire_tokens.Token(OTHER_TOKEN),
  )


# The longest, and every character that a token may have.
@pytest.mark.parametrize(
  "token",
  ["x" * 1024, "".join(chr(c) for c in range(0x21, 0x7F) if chr(c) != "#")],
)
def test_every_token_that_a_file_may_have_is_said_and_heard(serve, token):
  cfg = WireConfig(token_file=token_file(f"ada {token}"))
  run = serve(cfg)
  client = Client(run.address, cfg, learner="ada")

  assert client.get_run() == run.syncer.get_run()
  client.close()


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  "])
def test_the_scheme_is_heard_in_any_case(serve, scheme):
  run = serve(WireConfig(token_file=token_file(LEARNER_TOKEN)))
  metadata = (("authorization", scheme + LEARNER_TOKEN),)

  with grpc.insecure_channel(run.address) as channel:
    call = methods.make_call(channel, "GetRun", metadata=metadata)
    answer = call(pb.GetRunRequest(), timeout=10.0)

  assert answer.run_id == run.syncer.get_run().run_id


@pytest.mark.parametrize("scheme", ["", "Basic ", "bearer"])
def test_another_scheme_is_no_token(serve, scheme):
  run = serve(WireConfig(token_file=token_file(LEARNER_TOKEN)))
  metadata = (("authorization", scheme + LEARNER_TOKEN),)

  with grpc.insecure_channel(run.address) as channel:
    call = methods.make_call(channel, "GetRun", metadata=metadata)
    with pytest.raises(grpc.RpcError, match="no token was sent"):
      call(pb.GetRunRequest(), timeout=10.0)


def test_columns_that_were_swapped_show_no_token_to_a_caller(serve):
  # Long enough for a token, both of them: nothing tells which is the id.
  swapped = token_file(f"{LEARNER_TOKEN} learner-of-a-long-name")
  run = serve(WireConfig(token_file=swapped))
  cfg = WireConfig(token_file=token_file("learner-of-a-long-name"))
  client = Client(run.address, cfg, learner="ada")
  hello = port.Hello(
    learner="ada", nonce="n", layout_digest=run.layout.digest()
  )

  with pytest.raises(ServiceError, match="bound to another id") as caught:
    next(client.join(hello).notices())
  client.close()

  assert LEARNER_TOKEN not in str(caught.value)


def test_the_environment_has_tokens_where_no_file_is_named():
  env = {
    wire_tokens.TOKENS_VARIABLE: f"ada {LEARNER_TOKEN}\n{OTHER_TOKEN}",
    wire_tokens.ADMIN_TOKENS_VARIABLE: ADMIN_TOKEN,
  }

  known = wire_tokens.read_tokens(WireConfig(), env)

  assert [token.learner for token in known.learners] == ["ada", ""]
  assert known.of_onlooker() == wire_tokens.Token(ADMIN_TOKEN)
  assert "0123456789" not in repr(known)


@pytest.mark.parametrize("text", ["", " \n", "# rotated away\n"])
@pytest.mark.parametrize(
  "variable", [wire_tokens.TOKENS_VARIABLE, wire_tokens.ADMIN_TOKENS_VARIABLE]
)
def test_a_variable_that_is_set_and_has_no_token_is_refused(
  monkeypatch, variable, text
):
  monkeypatch.setenv(variable, text)

  with pytest.raises(ValueError, match=rf"\${variable} has no token"):
    Server("127.0.0.1:0", WireConfig())
  with pytest.raises(ValueError, match=rf"\${variable} has no token"):
    Client("127.0.0.1:1", WireConfig(), learner="ada")


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"tls_ca": "no-such.pem"}, "tls_ca=no-such.pem cannot be read"),
    ({"tls_cert": "no.pem", "tls_key": "no.key"}, "tls_key=no.key"),
    ({"tls_ca": __file__}, "is no certificate"),
  ],
)
def test_a_file_that_is_no_pem_is_named(changes, says):
  cfg = dataclasses.replace(WIRE, **{"tls_ca": certs()["tls_ca"], **changes})

  with pytest.raises(ValueError, match=says):
    Client("127.0.0.1:1", cfg, learner=ONLOOKER)


def test_a_server_names_the_ca_that_is_none():
  cfg = mutual(tls_ca=__file__)
  assert cfg.require_client_cert

  with pytest.raises(ValueError, match=r"wire\.tls_ca=.* is no certificate"):
    Server("127.0.0.1:0", cfg)


@contextlib.contextmanager
def resetting():
  """The address of somebody who resets every connection at once."""

  def accept() -> None:
    while True:
      try:
        connection, _ = listener.accept()
      except OSError:
        return
      connection.setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
      )
      connection.close()

  with socket.create_server(("127.0.0.1", 0)) as listener:
    thread = threading.Thread(target=accept)
    thread.start()
    try:
      yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
      listener.shutdown(socket.SHUT_RDWR)
      thread.join()


def test_a_probe_that_is_reset_at_once_closes_its_socket(monkeypatch):
  wrap = ssl.SSLContext.wrap_socket

  def late(*args, **kwargs):
    time.sleep(0.05)  # Time for the reset to arrive.
    return wrap(*args, **kwargs)

  monkeypatch.setattr(ssl.SSLContext, "wrap_socket", late)
  with resetting() as address:  # A socket left open is a warning: an error.
    assert tls.diagnose(address, WIRE) is None


BOM = b"\xef\xbb\xbf"


def marked(path: str, directory: pathlib.Path, before: bytes = b"") -> str:
  """A copy of a PEM file as some editors write it."""
  copy = directory / pathlib.Path(path).name
  copy.write_bytes(before + BOM + pathlib.Path(path).read_bytes())
  return str(copy)


@pytest.mark.parametrize("setting", ["tls_cert", "tls_key", "tls_ca"])
def test_a_byte_order_mark_in_a_pem_file_changes_nothing(
  serve, tmp_path, setting
):
  plain = mutual()
  changed = mutual(**{setting: marked(getattr(plain, setting), tmp_path)})

  for of_syncer, of_learner in ((changed, plain), (plain, changed)):
    run = serve(of_syncer)
    client = Client(run.address, of_learner, learner="0")
    assert client.get_run() == run.syncer.get_run()
    client.close()


def test_a_ca_behind_another_one_and_a_byte_order_mark_is_trusted(
  serve, tmp_path
):
  other = pathlib.Path(certs(ca="other")["tls_ca"]).read_bytes()
  both = mutual(tls_ca=marked(certs()["tls_ca"], tmp_path, other))
  run = serve(both)
  client = Client(run.address, both, learner="0")

  assert client.get_run() == run.syncer.get_run()
  assert tls.diagnose(run.address, both) is None
  client.close()


def self_signed(directory: pathlib.Path, *flags: str) -> dict[str, str]:
  """Settings of a certificate for 127.0.0.1 that is its own CA."""
  cert, key = str(directory / "own.pem"), str(directory / "own.key")
  subprocess.run(
    [
      *("openssl", "req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"),
      *("-subj", "/CN=127.0.0.1", "-keyout", key, "-out", cert, *flags),
    ],
    check=True,
    capture_output=True,
  )
  return {"tls_cert": cert, "tls_key": key, "tls_ca": cert}


def test_a_key_that_openssl_takes_and_grpc_does_not_is_named(tmp_path):
  own = self_signed(tmp_path, "-pkeyopt", "ec_paramgen_curve:secp256k1")
  cfg = WireConfig(**own)
  says = rf"gRPC cannot use wire\.tls_cert={own['tls_cert']}.*P-256"

  with pytest.raises(ValueError, match=says):
    Server("127.0.0.1:0", cfg)
  with pytest.raises(ValueError, match=says):
    Client("127.0.0.1:1", cfg, learner="0")


def test_a_certificate_without_alternative_names_is_told_so(serve, tmp_path):
  own = self_signed(tmp_path, "-pkeyopt", "ec_paramgen_curve:prime256v1")
  cfg = mutual(**own)
  run = serve(cfg)

  error = fault(run.address, cfg)

  assert error.code == "UNAUTHENTICATED"
  assert "has no subjectAltName (SAN)" in error.text
  assert "'127.0.0.1'" in error.text


def free_address() -> str:
  with socket.create_server(("127.0.0.1", 0)) as listener:
    return f"127.0.0.1:{listener.getsockname()[1]}"


REFUSED = {
  "a foreign certificate": (
    lambda: mutual(
      tls_cert=certs(ca="other")["tls_cert"],
      tls_key=certs(ca="other")["tls_key"],
    ),
    "not signed by the CA",
  ),
  "other tokens": (
    lambda: mutual(token_file=token_file(OTHER_TOKEN)),
    "wrong token",
  ),
}


@pytest.mark.parametrize("cause", REFUSED)
def test_a_standby_with_the_wrong_settings_ends_nobody(cause, caplog):
  of_standby, says = REFUSED[cause]
  standby = Server("127.0.0.1:0", of_standby())
  first = free_address()
  client = Client([first, standby.address], mutual(), learner="0")

  told = []
  for _ in range(4):  # Both are tried twice.
    with pytest.raises(ServiceError) as caught:
      client.get_run()
    told.append(caught.value)
  run = Served(THETA, RULES, "in_process", cfg=mutual())
  server = Server(first, mutual())
  server.serve(run.syncer)
  wait_for(lambda: is_served(client))

  assert all(error.code == "UNAVAILABLE" for error in told)
  assert sum(says in error.text for error in told) == 2
  assert sum(says in line for line in caplog.messages) == 1
  client.close()
  server.stop(0.0)
  run.close()
  standby.stop(0.0)


def is_served(client: Client) -> bool:
  try:
    return bool(client.get_run())
  except ServiceError as error:
    if not error.is_worth_retrying:
      raise
    return False


def test_a_learner_that_every_address_refuses_ends():
  foreign, others = (of_syncer() for of_syncer, _ in REFUSED.values())
  servers = [Server("127.0.0.1:0", cfg) for cfg in (foreign, others)]
  client = Client([server.address for server in servers], mutual(), learner="0")

  codes = []
  for _ in servers:
    with pytest.raises(ServiceError) as caught:
      client.get_run()
    codes.append(caught.value.code)

  assert codes == ["UNAVAILABLE", "UNAUTHENTICATED"]
  client.close()
  for server in servers:
    server.stop(0.0)


@pytest.mark.parametrize("setting", ["tls_ca", "tls_cert", "tls_key"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN"])
def test_a_file_that_is_being_written_stops_no_failover(
  serve, tmp_path, caplog, setting, content
):
  file = tmp_path / "copy.pem"
  file.write_bytes(pathlib.Path(certs()[setting]).read_bytes())
  first, second = (serve(mutual()) for _ in range(2))
  cfg = mutual(**{setting: str(file)})
  client = Client([first.address, second.address], cfg, learner="0")
  client.get_run()

  file.unlink()
  if content is not None:
    file.write_bytes(content)
  first.close()
  wait_for(lambda: is_served(client))

  assert client.get_run() == second.syncer.get_run()
  assert any(f"wire.{setting}={file}" in line for line in caplog.messages)
  client.close()
  with pytest.raises(ValueError, match=rf"wire\.{setting}={file}"):
    Client([second.address], cfg, learner="0")  # At the start, at once.


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_who_listens_everywhere_is_reached_by_its_certificates_name(host):
  run = Served(THETA, RULES, "in_process", cfg=mutual())
  server = Server(f"{host}:0", mutual())
  server.serve(run.syncer)
  client = Client(server.address, mutual(), learner="0")

  assert client.get_run() == run.syncer.get_run()
  client.close()
  server.stop(0.0)
  run.close()
