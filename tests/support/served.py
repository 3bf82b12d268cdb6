"""A real syncer of a few numbers, called in process or over gRPC."""

import dataclasses
import time
from collections.abc import Callable, Mapping

import numpy as np
import optax

from ddiloco_jax.algorithm import merge, outer
from ddiloco_jax.algorithm.fragments import make_layout
from ddiloco_jax.learner.client import Client
from ddiloco_jax.protocol import events, machine
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.syncer.merger import Merger, Tensors
from ddiloco_jax.syncer.server import Server
from ddiloco_jax.syncer.syncer import Syncer
from ddiloco_jax.wire import codec, options, port
from ddiloco_jax.wire.tokens import ONLOOKER, Onlooker


class Served:
  """A syncer, the Synchronizer under test, and what the syncer has recorded.

  Args:
    theta: Path -> float32 array; split by tensor into rules.num_fragments.
    rules: `fragment_params` is filled in.
    carrier: "grpc" or "in_process".
    learning_rate: Of the outer SGD, which has no momentum.
    merge_cfg: How deltas are merged; averaged if not given.
    learner: Whose token `sync` sends.

  Attributes:
    sync: What learners call.
    address: HOST:PORT, over gRPC.
    events: Every event that the machine has consumed.
    effects: Every decision, likewise.
  """

  def __init__(
    self,
    theta: Mapping[str, np.ndarray],
    rules: Rules,
    carrier: str = "grpc",
    learning_rate: float = 1.0,
    up_format: str = "float32",
    cfg: options.WireConfig | None = None,
    merge_cfg: merge.MergeConfig | None = None,
    learner: str | Onlooker = ONLOOKER,
  ):
    shapes = {path: (a.shape, "float32") for path, a in theta.items()}
    self.layout = make_layout(shapes, "tensor", rules.num_fragments)
    sizes = map(self.layout.num_params, range(rules.num_fragments))
    self.rules = dataclasses.replace(rules, fragment_params=tuple(sizes))
    self.cfg = cfg or options.WireConfig()
    self._merge_cfg = merge_cfg or merge.MergeConfig(direction="average")
    self.events: list[events.Event] = []
    self.effects: list[events.Effect] = []
    start = time.monotonic()
    self.syncer = Syncer(
      self._spec(up_format),
      machine.initial(self.rules),
      self._record,
      self._merger(theta, optax.sgd(learning_rate)),
      now=lambda: time.monotonic() - start,
    )
    self._server = None
    self._clients: list[Client] = []
    self.sync: port.Synchronizer = self.syncer
    self.address = ""
    if carrier == "grpc":
      self._server = Server("127.0.0.1:0", self.cfg)
      self._server.serve(self.syncer)
      self.address = self._server.address
      self.sync = self.client(learner)

  def client(self, learner: str | Onlooker) -> Client:
    """A client with connections of its own."""
    self._clients.append(Client(self.address, self.cfg, learner=learner))
    return self._clients[-1]

  def theta(self, p: int, session: port.Session) -> dict[str, np.ndarray]:
    """The newest version of a fragment, as a learner gets it."""
    header, data = self.sync.fetch(session, p, 0, False)
    return codec.decode(data, self.layout.fragment(p), header.format)

  def all_of(self, kind: type) -> list:
    """What was recorded of one kind of event or effect."""
    seen = self.events if issubclass(kind, events.Event) else self.effects
    return [each for each in list(seen) if isinstance(each, kind)]

  def close(self) -> None:
    self.syncer.close()
    for client in self._clients:
      client.close()
    if self._server:
      self._server.stop(0.0)

  def _record(self, event, effects, state) -> None:
    self.events.append(event)
    self.effects.extend(effects)

  def _spec(self, up_format: str) -> port.RunSpec:
    names = (
      "cycle_steps max_open_rounds quorum alpha lease_s max_ahead num_shards"
      " num_syncer_steps wait_for_publication adoption_delay_steps"
    )
    return port.RunSpec(
      run_id="run-1",
      epoch=1,
      layout=self.layout,
      up_format=up_format,
      down_format="float32",
      chunk_bytes=self.cfg.chunk_bytes,
      **{name: getattr(self.rules, name) for name in names.split()},
    )

  def _merger(
    self, theta: Mapping[str, np.ndarray], tx: optax.GradientTransformation
  ) -> Callable[..., Merger]:
    num = self.rules.num_fragments
    parts = tuple(
      {leaf.path: theta[leaf.path] for leaf in self.layout.fragment(p)}
      for p in range(num)
    )
    tensors = Tensors(parts, tuple(outer.init(tx, part) for part in parts))
    versions = (events.Version(1, 0),) * num
    cfg = self._merge_cfg
    return lambda done, failed: Merger(
      self.layout, tensors, versions, tx, cfg, "float32", done, failed
    )


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
  """Blocks until something holds."""
  deadline = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < deadline, f"not within {timeout_s} s"
    time.sleep(0.005)
