"""The bench of the simulator runs, at a small size."""

import json
import subprocess
import sys


def test_the_bench_of_the_simulator_ends_in_its_figures():
  argv = [sys.executable, "scripts/bench/simulate.py", "--share=0.001"]

  out = subprocess.run(
    [*argv, "--json"], capture_output=True, text=True, check=True
  ).stdout

  figures = json.loads(out)
  assert figures["us_per_event"] > 0
  assert figures["heap_ratio"] > 1
  assert figures["day_1m_s"] > 0
  assert 0.5 < figures["goodput_month"] <= 1
