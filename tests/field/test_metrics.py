"""What Prometheus scrapes from a run is what its status says."""

import contextlib
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ddiloco_jax.syncer.errors import InUse
from ddiloco_jax.syncer.exporter import Exporter
from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.served import wait_for


def scrape(address):
  """{(name, label value): value}"""
  with urllib.request.urlopen(f"http://{address}/metrics") as answer:
    text = answer.read().decode()
  return {
    (sample.name, *sample.labels.values()): sample.value
    for family in text_string_to_metric_families(text)
    for sample in family.samples
  }


def test_metrics_tell_of_learners_merges_tokens_bytes_and_waits(tmp_path):
  with (
    served_run(settings(quorum=2), tmp_path / "run") as run,
    contextlib.closing(Exporter("127.0.0.1", 0)) as exporter,
  ):
    assert not scrape(exporter.address)  # It tells of no run yet.
    exporter.watch(run.status)
    wait_for(
      lambda: (
        ("ddiloco_wait_seconds_total", "learners") in scrape(exporter.address)
      )
    )
    two = [LoopLearner(run.address, name, paced(0.02)) for name in ("a", "b")]
    with learners(*two):
      wait_for(lambda: sum(f.version.n for f in run.status().fragments) >= 4)

      found = scrape(exporter.address)

  assert found["ddiloco_learners_live",] == 2
  assert found["ddiloco_learners_contributing",] in (1, 2)
  assert found["ddiloco_merges_total",] >= 4
  versions = [found["ddiloco_fragment_version", str(p)] for p in (0, 1)]
  assert sum(versions) == found["ddiloco_merges_total",]
  assert found["ddiloco_tokens", "merged"] > 0
  assert found["ddiloco_bytes_total", "up"] > 0
  assert found["ddiloco_wait_seconds_total", "learners"] >= 1.0


def test_a_port_that_is_taken_is_said():
  with contextlib.closing(Exporter("127.0.0.1", 0)) as exporter:
    _, _, port = exporter.address.rpartition(":")

    with pytest.raises(InUse, match=port):
      Exporter("127.0.0.1", int(port))
