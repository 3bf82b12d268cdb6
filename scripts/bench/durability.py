"""What durable commits cost: how long a round takes with and without them.

  python scripts/bench/durability.py --json

The same run, a syncer and learners of plain numpy in one process, alternately
with run.durability="commit" and "snapshot". A round lasts from its first pull to
its publication, on the syncer's tape. Prints the medians, and the share of a
round with commits that is due to them.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # The learners are those of the tests.

from ddiloco_jax import config  # noqa: E402
from ddiloco_jax.launch import syncing  # noqa: E402
from ddiloco_jax.protocol import events, tape  # noqa: E402
from tests.support.numpy_learner import NumpyLearner  # noqa: E402

WARM_UP = 4  # Rounds that compile.


def rounds_of(run_dir: pathlib.Path) -> list[float]:
  """Seconds of each merged round, in order."""
  opened: dict[int, float] = {}
  lasted = []
  for line in tape.Reader(run_dir / "tape.jsonl").lines():
    for effect in line.effects:
      if isinstance(effect, events.Pull):
        opened.setdefault(effect.fragment, line.event.time)
    if isinstance(line.event, events.Merged):
      lasted.append(line.event.time - opened.pop(line.event.fragment))
  return lasted


def run_once(durability: str, args: argparse.Namespace) -> list[float]:
  cfg = config.default()
  cfg.sync.num_fragments = cfg.fragments.num_fragments = 2
  cfg.sync.cycle_steps = 4
  cfg.sync.quorum = args.learners
  cfg.run.durability = durability
  cfg.run.checkpoint_every_s = 1000.0
  size = int(args.fragment_mib * (1 << 20)) // 4
  theta = {f"w{p}": np.zeros(size, np.float32) for p in range(2)}
  with tempfile.TemporaryDirectory(prefix="durability-") as base:
    run_dir = pathlib.Path(base) / "run"
    run = syncing.SyncerRun(config.freeze(cfg), str(run_dir), theta=theta)
    try:
      learners = [
        NumpyLearner(run.syncer, f"l{i}", step_s=args.step_s)
        for i in range(args.learners)
      ]
      for learner in learners:
        learner.start()
      while sum(f.version.n for f in run.syncer.state.fragments) < (
        args.rounds + WARM_UP
      ):
        run.syncer.wait(0.0)  # Raises what went wrong.
        time.sleep(0.05)
      for learner in learners:
        learner.kill()
    finally:
      run.close()
    return rounds_of(run_dir)[WARM_UP:]


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--pairs", type=int, default=5)
  parser.add_argument("--rounds", type=int, default=20, help="of each run")
  parser.add_argument("--learners", type=int, default=2)
  parser.add_argument("--step_s", type=float, default=0.1)
  parser.add_argument("--fragment_mib", type=float, default=16.0)
  parser.add_argument("--json", action="store_true", help="one line, at last")
  args = parser.parse_args()
  seconds: dict[str, list[float]] = {"commit": [], "snapshot": []}
  for pair in range(args.pairs):
    for durability, lasted in seconds.items():
      lasted += run_once(durability, args)
    print(f"pair {pair + 1}/{args.pairs}", file=sys.stderr, flush=True)
  commit, snapshot = (
    statistics.median(seconds[name]) for name in ("commit", "snapshot")
  )
  told = {
    "commit_round_s": round(commit, 4),
    "snapshot_round_s": round(snapshot, 4),
    "commit_share": round((commit - snapshot) / commit, 4),
    "num_rounds": len(seconds["commit"]),
  }
  print(json.dumps(told, indent=None if args.json else 2, allow_nan=False))


if __name__ == "__main__":
  main()
