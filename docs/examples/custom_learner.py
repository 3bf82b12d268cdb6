"""A learner of grpcio, protobuf and numpy: no JAX, nothing of ddiloco_jax.

docs/protocol.md says how to make synchronizer_pb2.py; then, beside it:
python custom_learner.py --write_model=theta.npz
python -m ddiloco_jax.cli.syncer --layout_arrays=theta.npz ...
python custom_learner.py --syncer=HOST:PORT --learner_id=NAME
"""

import argparse
import hashlib
import queue
import threading
import uuid
import zlib

import grpc
import numpy as np
import synchronizer_pb2 as pb

BATCH, RATE = 32, 0.05
# Theta 0, from which the syncer starts: tree path -> array.
MODEL = {"linear/bias": np.zeros((), "f4"), "linear/weight": np.zeros(8, "f4")}


def train_step(theta, position):
  """Gradient descent on one batch, a function of its position; the loss."""
  rng = np.random.default_rng([position.shard, position.batch])
  x = rng.standard_normal((BATCH, 8))
  y = x @ np.linspace(-1, 1, 8) + 1.5 + rng.normal(0, 0.1, BATCH)
  error = x @ theta["linear/weight"] + theta["linear/bias"] - y
  theta["linear/bias"] -= np.float32(2 * RATE * error.mean())
  theta["linear/weight"] -= np.float32(2 * RATE / BATCH) * (x.T @ error)
  return float(np.mean(error**2))


def encode(flat, form):
  bits = flat.astype("<f4").view("<u4")
  if form == pb.FORMAT_BFLOAT16:  # The upper half, rounded to nearest even.
    bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
  return bits.tobytes()


class Learner:
  def __init__(self, address, learner_id):
    self.channel, up = grpc.insecure_channel(address), queue.Queue()
    self.say = lambda **message: up.put(pb.LearnerMessage(**message))
    self.push = self.method("stream_unary", "PushFragment", pb.PushOutcome)
    self.fetch = self.method("unary_stream", "FetchFragment", pb.FetchChunk)
    run = self.method("unary_unary", "GetRun", pb.Run)
    self.run = run(pb.GetRunRequest(), wait_for_ready=True, timeout=60)
    self.paths, text = [[] for _ in range(self.run.num_fragments)], ""
    for leaf in sorted(self.run.layout, key=lambda leaf: leaf.path.encode()):
      self.paths[leaf.fragment].append(leaf.path)
      dims = ",".join(map(str, leaf.shape))
      text += f"{leaf.path}\t{leaf.dtype}\t{dims}\t{leaf.fragment}\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    self.lock, self.ending = threading.Lock(), threading.Event()
    join = self.method("stream_stream", "Join", pb.SyncerMessage)
    self.stream = join(iter(up.get, None))
    hello = {"protocol_version": 1, "nonce": uuid.uuid4().hex}
    self.say(hello=hello | {"learner_id": learner_id, "layout_digest": digest})
    welcome = next(self.stream).welcome
    self.who = {"learner_id": learner_id, "incarnation": welcome.incarnation}
    self.who["session_secret"] = welcome.session_secret
    self.position = welcome.positions[0]  # In the shard that is ours to read.
    self.theta = {path: array.copy() for path, array in MODEL.items()}
    self.step, self.loss, self.base, self.version = 0, 0.0, {}, {}
    self.steps = [0] * self.run.num_fragments
    for p in range(self.run.num_fragments):
      self.adopt(p, alpha=0)

  def method(self, kind, name, answer):
    path = f"/ddiloco.v1.Synchronizer/{name}"
    to_bytes = lambda message: message.SerializeToString()  # noqa: E731
    return getattr(self.channel, kind)(path, to_bytes, answer.FromString)

  def counts(self, p):
    return {"steps": self.steps[p], "tokens": self.steps[p] * BATCH}

  def adopt(self, p, alpha, exact=False):
    """Goes on from the newest version; `exact` asks for it in float32."""
    request = pb.FetchRequest(fragment=p, exact=True, **self.who)
    first, *parts, last = self.fetch(request)
    data = b"".join(part.data for part in parts)
    assert zlib.crc32(data) == last.trailer.crc32, "damaged on the way"
    flat = self.base[p] = np.frombuffer(data, "<f4")
    for path in self.paths[p]:
      old = self.theta[path]
      new, flat = flat[: old.size].reshape(old.shape), flat[old.size :]
      self.theta[path] = np.float32(alpha) * old + np.float32(1 - alpha) * new
    self.version[p] = first.header.version
    done = {"fragment": p, "version": self.version[p], "exact": exact}
    self.say(applied=done | {"step": self.step, "counts": self.counts(p)})
    self.steps[p] = 0

  def answer(self, pull):
    """Pushes what this learner did to a fragment since it adopted it."""
    p, form, size = pull.fragment, self.run.up_format, self.run.chunk_bytes
    local = np.concatenate([self.theta[x].ravel() for x in self.paths[p]])
    data = encode(self.base[p] - local, form)
    what = {"fragment": p, "round": pull.round, "attempt": pull.attempt}
    what |= {"base": self.version[p], "counts": self.counts(p), "format": form}
    what |= {"positions": [self.position], "num_bytes": len(data)}
    cuts = [{"data": data[i : i + size]} for i in range(0, len(data), size)]
    parts = [{"header": self.who | what}, *cuts]
    parts.append({"trailer": {"crc32": zlib.crc32(data)}})
    self.push(pb.PushChunk(**part) for part in parts)

  def train(self, step_s):
    """Steps, on a thread of its own, until the run ends."""
    while not self.ending.wait(step_s):
      with self.lock:
        self.loss = train_step(self.theta, self.position)
        self.step, self.steps = self.step + 1, [n + 1 for n in self.steps]
        self.position.batch += 1
        counts = [self.counts(p) for p in self.version]  # Fragment by fragment.
        report = {"step": self.step, "counts": counts}
        report |= {"positions": [self.position], "metrics": {"loss": self.loss}}
        self.say(report=report)

  def listen(self):
    """Does, between two steps, what the syncer asks; returns the exit code."""
    for message in self.stream:
      with self.lock:
        if message.HasField("pull"):
          self.answer(message.pull)
        elif message.HasField("published"):
          p, exact = message.published.fragment, message.published.exact
          self.adopt(p, 0 if exact else self.run.alpha, exact)
        elif message.HasField("ending"):
          self.ending.set()  # Steps no more, but answers and adopts.
        elif message.HasField("finished"):
          print(f"{message.finished.reason} (loss {self.loss:.4f})")
          return message.finished.exit_code
      self.say(heartbeat={})  # The syncer beats, too.


if __name__ == "__main__":
  flags = argparse.ArgumentParser()
  flags.add_argument("--write_model", help="path of an .npz file; then exits")
  flags.add_argument("--syncer", default="127.0.0.1:8470", help="HOST:PORT")
  flags.add_argument("--learner_id", default="custom")
  flags.add_argument("--step_s", type=float, default=0.02)
  args = flags.parse_args()
  if args.write_model:
    raise SystemExit(np.savez(args.write_model, **MODEL))
  learner = Learner(args.syncer, args.learner_id)
  threading.Thread(None, learner.train, args=[args.step_s], daemon=True).start()
  raise SystemExit(learner.listen())
