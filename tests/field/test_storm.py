"""The storm's own command over learners that are free of JAX."""

import dataclasses
import json
import subprocess

import pytest

from ddiloco_jax.wire.options import WireConfig
from tests.support import secured
from tests.support.processes import ROOT, module, overrides

M7 = [
  *("--config=configs/storm_tiny.py", "--numpy_learners", "--faults=kills"),
  *("--down_s=5", "--fault_free=none", "--json"),
  *overrides(sync__max_learners=32, sync__num_shards=32, train__batch_size=2),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
  ("num", "step_s", "minutes", "per_hour"),
  [(6, 0.25, 0.67, 270), (32, 1.0, 15, 125)],
)
def test_most_learners_contribute_in_a_storm_of_kills(
  tmp_path, num, step_s, minutes, per_hour
):
  # [M7] In virtual time: tests/protocol/test_storm.py.
  done = subprocess.run(
    module(
      "ddiloco_jax.cli.storm",
      *M7,
      f"--learners={num}",
      f"--step_s={step_s}",
      f"--minutes={minutes}",
      f"--faults_per_hour={per_hour}",
      f"--run_dir={tmp_path / 'storm'}",
    ),
    cwd=ROOT,
    capture_output=True,
    text=True,
  )

  assert done.stdout, done.stderr[-3000:]
  (figures,) = json.loads(done.stdout.splitlines()[-1])["storms"]
  assert figures["num_faults"] >= 0.8 * per_hour * minutes / 60
  assert figures["contributors_median"] >= 28 / 32 * num
  assert figures["contributors_over_eligible_median"] >= 7 / 8
  assert figures["uptime"] == 1.0
  assert figures["versions_lost"] == figures["versions_repeated"] == 0
  assert figures["ledger_balanced"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_storm_over_a_run_with_tls_and_tokens_is_watched(tmp_path):
  plain = dataclasses.asdict(WireConfig())
  wire = dataclasses.asdict(secured.secured(WireConfig()))
  changed = {k: v for k, v in wire.items() if v != plain[k]}
  done = subprocess.run(
    module(
      "ddiloco_jax.cli.storm",
      *M7,
      *overrides(**{f"wire__{name}": v for name, v in changed.items()}),
      *("--learners=2", "--step_s=0.1", "--minutes=0.1"),
      *("--faults_per_hour=600", f"--run_dir={tmp_path / 'storm'}"),
    ),
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=180.0,
  )

  assert done.stdout, done.stderr[-3000:]
  (figures,) = json.loads(done.stdout.splitlines()[-1])["storms"]
  assert figures["versions_lost"] == figures["versions_repeated"] == 0
