"""What synchronizing costs a learner: step time with it over step time without.

  python scripts/bench/overhead.py --json

One learner of 10M parameters (B=8, T=128) runs its ordinary loop against a real
syncer process on loopback, at the cadence H=P=24. Blocks of 12 steps with and
without synchronization alternate in one process, so that both see the same
machine; XLA has one thread, as if the host had a core to spare for the link.
Prints the median over pairs of blocks. At most 1.05 is the bar.
"""

import os

os.environ["XLA_FLAGS"] = (
  "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from ddiloco_jax import config
from ddiloco_jax.launch import training
from ddiloco_jax.learner.client import Client
from ddiloco_jax.learner.learner import Learner, LearnerConfig
from ddiloco_jax.learner.link import Link
from ddiloco_jax.models import transformer
from ddiloco_jax.training import mesh, trainer

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK_STEPS = 12


class Gate(Link):
  """A link that can be shut: then the loop runs as if there were no syncer."""

  is_open = True

  def published(self):
    return super().published() if self.is_open else []

  def due_next(self, step_s):
    return super().due_next(step_s) if self.is_open else []

  def offer(self, copies):
    if self.is_open:
      super().offer(copies)

  def report(self, report):
    if self.is_open:
      super().report(report)


class Blocks:
  """Times blocks of steps at the boundaries; opens and shuts the gate."""

  def __init__(self, gate, num_pairs):
    self._gate = gate
    self._num_pairs = num_pairs
    self._start = 0.0
    self.seconds = {True: [], False: []}

  def at_boundary(self, step, metrics, progress):
    if step % BLOCK_STEPS:
      return
    now = time.perf_counter()
    if step > 2 * BLOCK_STEPS:  # The first pair warms up.
      self.seconds[self._gate.is_open].append((now - self._start) / BLOCK_STEPS)
      show_progress(len(self.seconds[False]), self._num_pairs)
    self._gate.is_open = not self._gate.is_open
    self._start = time.perf_counter()

  def is_done(self):
    return len(self.seconds[False]) >= self._num_pairs


def show_progress(done, total):
  print(f"\rpair {done} of {total}", end="", file=sys.stderr, flush=True)


def make_config(args):
  cfg = config.default()
  cfg.model.num_layers, cfg.model.embed_dim = 8, 320
  cfg.model.num_heads, cfg.model.num_kv_heads, cfg.model.head_dim = 5, 5, 64
  cfg.model.mlp_dim = 864
  cfg.train.batch_size, cfg.train.seq_len = args.batch_size, args.seq_len
  if args.small:
    cfg.model.num_layers, cfg.model.embed_dim, cfg.model.mlp_dim = 4, 64, 128
  cfg.sync.num_syncer_steps = 10**6
  return config.freeze(cfg)


def start_syncer(cfg, run_dir):
  """The syncer in a process of its own; returns it and its address."""
  overrides = [
    f"--config.model.{name}={value}"
    for name, value in dataclasses.asdict(cfg.model).items()
  ]
  child = subprocess.Popen(
    [
      sys.executable,
      "-m",
      "ddiloco_jax.cli.syncer",
      "--config=configs/tiny.py",
      f"--run_dir={run_dir}",
      "--address=127.0.0.1:0",
      "--config.sync.num_syncer_steps=1000000",
      *overrides,
    ],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )
  assert child.stdout
  for line in child.stdout:
    if "serves at" in line:
      return child, line.split()[-1]
  raise SystemExit(f"the syncer did not start: exit code {child.wait()}")


def measure(args):
  cfg = make_config(args)
  with tempfile.TemporaryDirectory() as run_dir:
    child, address = start_syncer(cfg, run_dir)
    try:
      gate = Gate(Client(address, cfg.wire, learner="0"), "0")
      cfg, _ = config.with_shared(cfg, gate.run.settings_json)
      model = trainer.Trainer(
        transformer.make_model(cfg.model),
        cfg.train,
        mesh.make_mesh(cfg.mesh),
        seed=None,
      )
      blocks = Blocks(gate, args.pairs)
      learner = Learner(
        gate,
        model,
        training.batches_of(cfg, gate.run.num_shards),
        LearnerConfig(),
        blocks.at_boundary,
      )
      learner.train(blocks.is_done)
    finally:
      child.terminate()
      child.wait()
  layout = gate.run.layout
  return blocks.seconds, sum(leaf.num_params for leaf in layout.leaves)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--pairs", type=int, default=10)
  parser.add_argument("--batch_size", type=int, default=8)
  parser.add_argument("--seq_len", type=int, default=128)
  parser.add_argument(
    "--small", action="store_true", help="a tiny model, to look for errors only"
  )
  parser.add_argument("--json", action="store_true")
  args = parser.parse_args()
  seconds, num_params = measure(args)
  pairs = list(zip(seconds[True], seconds[False]))
  ratios = [with_ / without for with_, without in pairs]
  figures = {
    "step_ratio": statistics.median(ratios),
    "added_ms": 1e3 * statistics.median(a - b for a, b in pairs),
    "step_s": statistics.median(seconds[False]),
    "ratio_min": min(ratios),
    "ratio_max": max(ratios),
  }
  print(file=sys.stderr)
  print(
    f"a step takes {figures['step_s']:.3f} s; with synchronization"
    f" {figures['step_ratio']:.3f} times that"
    f" ({figures['added_ms']:+.1f} ms, {len(ratios)} pairs,"
    f" {num_params / 1e6:.1f}M parameters)"
  )
  if args.json:
    said = report(figures, vars(args) | {"num_params": num_params})
    print(json.dumps(said, allow_nan=False))


def report(figures, settings):
  commit = subprocess.run(
    ["git", "rev-parse", "--short", "HEAD"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  ).stdout.strip()
  return {
    "name": "overhead",
    "figures": figures,
    "settings": settings,
    "commit": commit,
  }


if __name__ == "__main__":
  main()
