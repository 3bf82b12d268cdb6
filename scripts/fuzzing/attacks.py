"""What a hostile caller does to a syncer: one function a way.

The caller is an insider, with a token that is bound to the id "mallory": who has
none gets no further than the gate, which is attacked as well.
"""

import collections
import contextlib
import dataclasses
import random
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf import message_factory

from ddiloco_jax.wire import codec, messages, methods, port
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from scripts.fuzzing import inputs

_DEADLINE_S = 5.0
_MAX_HELD = 40
_METHODS = [
  method
  for method in methods.SERVICE.methods
  if method.name not in ("Join", "PushFragment")
]


@dataclasses.dataclass
class Target:
  """A syncer under attack, as the attacker knows it.

  Attributes:
    address: HOST:PORT.
    token: The attacker's.
    num_inputs: By attack.
    codes: By (method, code).
    unexpected: What is no code for a caller's fault: (method, code, text).
  """

  address: str
  token: str
  num_inputs: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  codes: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  unexpected: list[tuple[str, str, str]] = dataclasses.field(
    default_factory=list
  )

  def __post_init__(self):
    self._held: collections.deque[Callable[[], Any]] = collections.deque()
    self._channel = grpc.insecure_channel(self.address)
    self.known: dict[str, Any] = {}
    self.look()

  def look(self) -> None:
    """Learns what an honest caller would send."""
    run = self.call("GetRun", pb.GetRunRequest(), timeout=30.0)
    spec = messages.run_from_pb(run)
    self.known = {
      "protocol_version": port.PROTOCOL_VERSION,
      "learner_id": "mallory",
      "layout_digest": spec.layout.digest(),
      "run_id": spec.run_id,
      "format": run.up_format,
      "incarnation": self.known.get("incarnation", 1),
      "session_secret": self.known.get("session_secret", ""),
      "num_bytes": codec.num_bytes(spec.layout.fragment(0), spec.up_format),
      "fragment": 0,
      "nonce": uuid.uuid4().hex,
      "takeover": True,
      "epoch": spec.epoch,
      "donor_id": "healthy",
      "interval_s": 0.1,
      "steps": 1,
      "tokens": 100,
      "step": 1,
      "counts": spec.layout.num_fragments,  # Of repeated ones, how many.
      "reason": "fuzzing",
    }

  def call(self, name: str, request: Any, **settings: Any) -> Any:
    metadata = (("authorization", f"Bearer {self.token}"),)
    made = methods.make_call(self._channel, name, metadata=metadata)
    return made(request, **settings)

  def raw(self, name: str, kind: str, **settings: Any) -> Any:
    """A call whose messages are bytes."""
    path = f"/{methods.SERVICE.full_name}/{name}"
    metadata = [("authorization", f"Bearer {self.token}")]
    metadata += settings.pop("metadata", ())
    made = getattr(self._channel, kind)(path)
    request = settings.pop("request")
    return made(request, metadata=metadata, timeout=_DEADLINE_S, **settings)

  def hold(self, end: Callable[[], Any]) -> None:
    """Leaves something open for a while."""
    self._held.append(end)
    while len(self._held) > _MAX_HELD:
      self._held.popleft()()

  def release(self) -> None:
    """Ends all that is held open."""
    while self._held:
      self._held.popleft()()

  def note(self, name: str, code: grpc.StatusCode, text: str | None) -> None:
    self.codes[name, code.name] += 1
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
      self.unexpected.append((name, code.name, text or ""))

  def close(self) -> None:
    self.release()
    self._channel.close()


def unary(rng: random.Random, target: Target) -> None:
  """A random or broken request to a method that takes one."""
  method = rng.choice(_METHODS)
  kind = message_factory.GetMessageClass(method.input_type)
  data = inputs.message(rng, kind, target.known).SerializeToString()
  if rng.random() < 0.5:
    data = inputs.broken(rng, data)
  if rng.random() < 0.01:
    data = bytes(5 << 20)
  call = target.raw(method.name, "unary_stream", request=data)
  _drain(target, method.name, call, most=3)


def join(rng: random.Random, target: Target) -> None:
  """A control stream: any words in any order, ended in any way."""
  words = []
  if rng.random() < 0.3:
    target.known["nonce"] = f"{rng.getrandbits(64):x}"  # The old one is fenced.
  if rng.random() < 0.8:
    hello = inputs.message(rng, pb.Hello, target.known)
    words.append(pb.LearnerMessage(hello=hello))
  for _ in range(rng.choice((0, 1, 2, 5, 20))):
    words.append(inputs.message(rng, pb.LearnerMessage, target.known))
  call = _stream(rng, target, "Join", words)
  for said in _drain(target, "Join", call, most=rng.choice((1, 2, 5))):
    with contextlib.suppress(Exception):
      welcome = pb.SyncerMessage.FromString(said).welcome
      if welcome.session_secret:
        target.known["incarnation"] = welcome.incarnation
        target.known["session_secret"] = welcome.session_secret


def push(rng: random.Random, target: Target) -> None:
  """An upload: parts missing, twice, too long, in any order, or cut off."""
  header = pb.PushChunk(
    header=inputs.message(rng, pb.ReplyHeader, target.known)
  )
  size = target.known["num_bytes"] + rng.choice((0, 0, 0, 1, -1, 1000))
  data = rng.randbytes(max(0, size))
  parts = [header, *[pb.PushChunk(data=data)] * rng.choice((0, 1, 1, 2))]
  crc32 = rng.choice((zlib.crc32(data), rng.randrange(2**32)))
  parts.append(pb.PushChunk(trailer=pb.Trailer(crc32=crc32)))
  if rng.random() < 0.4:
    rng.shuffle(parts)
  if rng.random() < 0.3:
    parts.append(inputs.message(rng, pb.PushChunk, target.known))
  if rng.random() < 0.3:
    del parts[rng.randrange(len(parts)) :]
  call = _stream(rng, target, "PushFragment", parts)
  _drain(target, "PushFragment", call, most=1)


def gate(rng: random.Random, target: Target) -> None:
  """Metadata: no token, another's scheme, too much of it."""
  name = rng.choice([*_METHODS, *methods.SERVICE.methods]).name
  token = rng.choice(("", "Bearer ", "Bearer x", "Basic x", "Bearer é"))
  metadata = [("authorization", token.encode("ascii", "ignore").decode())]
  for n in range(rng.choice((0, 1, 10, 300))):
    metadata.append((f"x-{n}", "v" * rng.choice((1, 100, 9000))))
  path = f"/{methods.SERVICE.full_name}/{name}"
  with grpc.insecure_channel(target.address) as channel:
    call = channel.stream_stream(path)(
      iter([b""]), metadata=tuple(metadata), timeout=_DEADLINE_S
    )
    _drain(target, f"{name} without a token", call, most=1)


def port_bytes(rng: random.Random, target: Target) -> None:
  """Bytes that are no HTTP/2, or not for long; sockets that say little."""
  host, _, number = target.address.rpartition(":")
  try:
    end = socket.create_connection((host, int(number)), 5.0)
  except OSError:
    return
  preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
  settings = b"\0\0\0\x04\0\0\0\0\0"
  data = rng.choice(
    (
      rng.randbytes(rng.randint(0, 3000)),
      preface[: rng.randint(0, len(preface))],
      preface + rng.randbytes(rng.randint(0, 500)),
      preface + settings + _frames(rng),
      b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
      b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(300),
    )
  )
  with contextlib.suppress(OSError):
    end.sendall(data)
    if rng.random() < 0.3:  # It says no more, and stays.
      target.hold(end.close)
      return
    end.settimeout(0.05)
    end.recv(1000)
  end.close()


ATTACKS: dict[str, Callable[[random.Random, Target], None]] = {
  "unary": unary,
  "join": join,
  "push": push,
  "gate": gate,
  "port": port_bytes,
}


def attack(rng: random.Random, target: Target) -> str:
  """One input, of a way drawn at random; returns its name."""
  name = rng.choices(list(ATTACKS), (4, 3, 4, 1, 1))[0]
  target.num_inputs[name] += 1
  ATTACKS[name](rng, target)
  return name


def _frames(rng: random.Random) -> bytes:
  """HTTP/2 frames of any type, flags and stream, some of a wrong length."""
  frames = b""
  for _ in range(rng.randint(1, 20)):
    size = rng.choice((0, 1, 4, 8, 40))
    frames += size.to_bytes(3, "big") + bytes(
      (rng.randrange(12), rng.randrange(256))
    )
    frames += rng.choice((0, 1, 3, 2**31 - 1)).to_bytes(4, "big")
    frames += rng.randbytes(size)
  return frames


def _stream(
  rng: random.Random, target: Target, name: str, sent: list[Any]
) -> Any:
  over = threading.Event()
  ending = rng.choice(("close", "close", "cancel", "stay"))

  def parts() -> Iterator[bytes]:
    for part in sent:
      data = part.SerializeToString()
      yield inputs.broken(rng, data) if rng.random() < 0.1 else data
    if ending != "close":
      over.wait(_DEADLINE_S)

  call = target.raw(name, "stream_stream", request=parts())
  call.add_callback(over.set)
  if ending == "cancel":
    time.sleep(rng.choice((0.0, 0.001, 0.01)))
    call.cancel()
  elif ending == "stay":
    target.hold(call.cancel)
  return call if ending != "stay" else _Left(target, name, call)


class _Left:
  """A call that nobody listens to; its end is noted when it comes."""

  def __init__(self, target: Target, name: str, call: Any):
    call.add_callback(lambda: target.note(name, call.code(), call.details()))

  def __iter__(self) -> Iterator[bytes]:
    return iter(())

  def cancel(self) -> None:
    """It is held."""

  def code(self) -> None:
    """Not known yet."""


def _drain(target: Target, name: str, call: Any, most: int) -> list[bytes]:
  """The first answers; then the end of the call is noted."""
  said = []
  try:
    for answer in call:
      said.append(answer)
      if len(said) >= most:
        call.cancel()
  except grpc.RpcError:
    pass
  code = call.code()
  if code is not None:
    target.note(name, code, call.details())
  return said
