"""How a run stands, as metrics that Prometheus scrapes.

Nothing is counted twice: what is exported is the status of the moment, and the
time that was spent in each wait. docs/operations.md lists the names.
"""

import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
  CounterMetricFamily,
  GaugeMetricFamily,
  Metric,
)

from ddiloco_jax.protocol.status import Status
from ddiloco_jax.syncer.errors import InUse

_GAUGES = {
  "learners_live": ("num_live", "Learners heard within the lease."),
  "learners_training": ("num_training", "Live ones that take steps."),
  "learners_eligible": ("num_eligible", "Possible members of the next round."),
  "learners_contributing": ("num_contributing", "In the newest merge."),
  "syncer_step": ("t", "t."),
  "learner_step_seconds": ("step_s", "Of the learner that sets the pace."),
  "quorum_seconds": ("quorum_s", "From an opening to the K-th reply."),
  "sync_seconds": ("sync_s", "From the last reply to the adoption."),
  "epoch": ("epoch", "Starts of a syncer."),
}


class Exporter:
  """Has an address from its making on, and tells of a run once it has one.

  Args:
    host: To serve on.
    port: 0 takes a free one.

  Attributes:
    address: HOST:PORT that is scraped.

  Raises:
    InUse: the address cannot be listened on.
  """

  def __init__(self, host: str, port: int):
    self._status: Callable[[], Status] | None = None
    self._waits: dict[str, float] = {}
    self._over = threading.Event()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(self)
    try:
      self._server, self._serving = start_http_server(port, host, registry)
    except OSError as error:
      raise InUse(
        f"metrics cannot be served on {host}:{port}: {error.strerror}. Choose"
        " another --metrics_port; 0 takes a free one."
      ) from error
    self.address = f"{host}:{self._server.server_port}"

  def watch(self, status: Callable[[], Status]) -> None:
    """Tells how a run stands from now on, and watches what it waits for."""
    self._status = status
    threading.Thread(
      target=self._watch, args=(status,), name="waits", daemon=True
    ).start()

  def collect(self) -> Iterator[Metric]:
    """The families of one scrape."""
    if self._status is None:
      return
    status = self._status()
    for name, (field, text) in _GAUGES.items():
      yield GaugeMetricFamily(
        f"ddiloco_{name}", text, value=getattr(status, field)
      )
    yield _labelled(
      GaugeMetricFamily,
      "fragment_version",
      "Merges of a fragment, over all epochs.",
      "fragment",
      {str(f.fragment): f.version.n for f in status.fragments},
    )
    yield CounterMetricFamily(
      "ddiloco_merges", "Of all fragments.", value=_merges(status)
    )
    yield _labelled(
      GaugeMetricFamily,
      "tokens",
      "Of the run, by book.",
      "book",
      {book.name: book.tokens for book in status.books},
    )
    yield _labelled(
      CounterMetricFamily,
      "bytes",
      "Of fragments.",
      "direction",
      {"up": status.bytes_up, "down": status.bytes_down},
    )
    yield _labelled(
      CounterMetricFamily, "events", "By kind.", "kind", status.counters
    )
    yield _labelled(
      CounterMetricFamily,
      "wait_seconds",
      "Spent in each wait of this process, to a second.",
      "reason",
      self._waits,
    )

  def close(self) -> None:
    """Stops to serve."""
    self._over.set()
    self._server.shutdown()
    self._server.server_close()
    self._serving.join()

  def _watch(self, status: Callable[[], Status]) -> None:
    before = time.monotonic()
    while not self._over.wait(1.0):
      kind, now = status().waiting_kind, time.monotonic()
      waits = dict(self._waits)  # Replaced whole: a scrape reads it.
      waits[kind] = waits.get(kind, 0.0) + now - before
      self._waits, before = waits, now


def _merges(status: Status) -> int:
  return sum(f.version.n for f in status.fragments)


def _labelled(kind, name: str, text: str, label: str, values) -> Metric:
  family = kind(f"ddiloco_{name}", text, labels=[label])
  for key, value in values.items():
    family.add_metric([key], value)
  return family
