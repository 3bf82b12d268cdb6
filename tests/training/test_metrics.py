"""Metrics files that every JSON reader can read."""

import json
import resource
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco_jax.training.metrics import MetricsWriter, read_metrics


def strict_lines(path):
  def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")

  return [
    json.loads(line, parse_constant=refuse)
    for line in path.read_text().splitlines()
  ]


def test_values_of_all_kinds_are_written_as_they_are(tmp_path):
  path = tmp_path / "made" / "metrics.jsonl"

  with MetricsWriter(path) as metrics:
    metrics.write({"loss": jnp.float32(0.5), "num_tokens": np.int64(7)})
    metrics.write({"name": "a", "h": (1, 2.5), "by": {3: np.arange(2)}})

  assert strict_lines(path) == [
    {"loss": 0.5, "num_tokens": 7},
    {"name": "a", "h": [1, 2.5], "by": {"3": [0, 1]}},
  ]
  assert list(read_metrics(path)) == strict_lines(path)


def test_what_is_not_finite_becomes_null_and_is_named(tmp_path):
  path = tmp_path / "metrics.jsonl"

  with MetricsWriter(path) as metrics:
    metrics.write(
      {
        "loss": jnp.float32(jnp.nan),
        "norms": [1.0, float("-inf")],
        "by": {"head": np.float32(np.inf)},
      }
    )

  assert strict_lines(path) == [
    {
      "loss": None,
      "norms": [1.0, None],
      "by": {"head": None},
      "not_finite": ["loss", "norms.1", "by.head"],
    }
  ]


def test_each_line_is_there_as_soon_as_it_is_written(tmp_path):
  path = tmp_path / "metrics.jsonl"
  metrics = MetricsWriter(path)

  for step in range(3):
    metrics.write({"step": step})

    assert len(strict_lines(path)) == step + 1
  metrics.close()


def test_a_restart_appends_and_drops_a_torn_line(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step":1}\n{"step":2}\n{"st')
  assert list(read_metrics(path)) == [{"step": 1}, {"step": 2}]

  with MetricsWriter(path) as metrics:
    metrics.write({"step": 3})

  assert strict_lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_file_with_nothing_but_a_torn_line_starts_anew(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text("x" * 100_000)

  with MetricsWriter(path) as metrics:
    metrics.write({"step": 3})

  assert strict_lines(path) == [{"step": 3}]


def test_lines_of_several_threads_do_not_mix(tmp_path):
  path = tmp_path / "metrics.jsonl"
  with MetricsWriter(path) as metrics:
    threads = [
      threading.Thread(
        target=lambda i=i: [metrics.write({"i": i}) for _ in range(200)]
      )
      for i in range(4)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

  assert sorted(line["i"] for line in strict_lines(path)) == [
    i for i in range(4) for _ in range(200)
  ]


def test_what_json_cannot_say_is_refused_by_name(tmp_path):
  with (
    MetricsWriter(tmp_path / "metrics.jsonl") as metrics,
    pytest.raises(ValueError, match="'when' is a object"),
  ):
    metrics.write({"when": object()})


def test_a_full_disk_is_said_once_and_leaves_no_torn_line(tmp_path, caplog):
  path = tmp_path / "metrics.jsonl"
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  with MetricsWriter(path) as writer:
    writer.write({"step": 1})
    try:
      # A write beyond it fails, as one to a full disk does.
      resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 3, hard))
      for step in range(2, 200):
        writer.write({"step": step, "text": "x" * 100})
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "metrics.jsonl, and goes on" in caplog.text
    writer.write({"step": 200})

  steps = [line["step"] for line in read_metrics(path)]
  assert steps[0] == 1
  assert steps[-1] == 200
  assert steps == sorted(set(steps))
