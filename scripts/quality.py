"""Quality of a run, measured: the tables of docs/quality.md. Resumable.

  python scripts/quality.py --out=runs/quality --json

(a) A real run of four learners, one killed and restarted: its tape imposed on
    arithmetic that is written apart must give the same parameters.
(b) For each seed, four learners with a syncer against one lone learner of the
    same steps, batch and schedule: held-out loss over the same windows.

What lies under --out is not run again. About half an hour on two CPU cores.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # For the tests' reference.
CONFIG = "configs/tiny.py"
STUDENT_T_2 = 4.303  # 97.5 % point for three seeds.


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=pathlib.Path, default="runs/quality")
  parser.add_argument("--steps", type=int, default=600)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument(
    "--quorum",
    type=int,
    default=4,
    help="K; with 4, t counts what all four have done, as the lone one's steps",
  )
  parser.add_argument("--windows", type=int, default=512)
  parser.add_argument("--json", action="store_true")
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  imposed = once(args.out / "imposed.json", lambda: study_imposed(args.out))
  rows = [
    once(args.out / f"seed_{seed}.json", lambda seed=seed: study(args, seed))
    for seed in range(args.seeds)
  ]
  figures = {**imposed, **summary(rows)}
  print_table(rows, figures)
  if args.json:
    print(
      json.dumps(
        {
          "name": "quality",
          "figures": figures,
          "settings": {
            name: str(value) for name, value in sorted(vars(args).items())
          }
          | {"rows": rows},
          "commit": commit(),
        }
      )
    )


def once(path, make):
  """The result at a path, made if it is not there."""
  if not path.exists():
    result = make()
    path.write_text(json.dumps(result | {"commit": commit()}))
  return json.loads(path.read_text())


def study_imposed(out):
  from tests.run import test_imposed

  run_dir = finish(
    out / "imposed", lambda path: local(path, *test_imposed.FLAGS)
  )
  worst, num_merges = test_imposed.compare(run_dir)
  return {"imposed_error": float(worst), "imposed_merges": num_merges}


def study(args, seed):
  """Both arms of one seed; losses are nats per token of the same windows."""
  steps = [
    f"--config.run.seed={seed}",
    f"--config.train.decay_steps={args.steps}",
    f"--config.evaluate.num_windows={args.windows}",
  ]
  four = finish(
    args.out / f"four_{seed}",
    lambda path: local(
      path,
      "--learners=4",
      f"--config.sync.quorum={args.quorum}",
      f"--config.sync.num_syncer_steps={args.steps}",
      *steps,
    ),
  )
  lone = finish(
    args.out / f"lone_{seed}",
    lambda path: call(
      "ddiloco_jax.train",
      f"--run_dir={path}",
      f"--config.run.num_steps={args.steps}",
      "--config.evaluate.every_steps=0",
      *steps,
    ),
  )
  losses = {
    "four": window_losses(four, args.windows),
    "lone": window_losses(lone, args.windows),
  }
  summary = json.loads((four / "summary.json").read_text())
  gain = 1 - losses["four"] / losses["lone"]
  return {
    "seed": seed,
    "four": float(losses["four"].mean()),
    "lone": float(losses["lone"].mean()),
    "gain_percent": 100
    * float(1 - losses["four"].mean() / losses["lone"].mean()),
    "windows_better": float((gain > 0).mean()),
    "contributors_median": summary["contributors_median"],
    "realised_h_median": statistics.median(
      h for h in summary["realised_h"] if h
    ),
  }


def window_losses(run_dir, num_windows):
  """Loss of a run's newest parameters on each held-out window, nats a token."""
  import jax

  from ddiloco_jax import config
  from ddiloco_jax.data import stream
  from ddiloco_jax.models import transformer
  from ddiloco_jax.training import step
  from ddiloco_jax.training.checkpoint import Checkpoints

  cfg = config.freeze(config.load_file(str(ROOT / CONFIG)))
  with Checkpoints(run_dir / "checkpoints", read_only=True) as saved:
    params = saved.restore(max(saved.steps()))["params"]
    params = jax.tree.map(jax.numpy.asarray, params)
  model = transformer.make_model(cfg.model)
  one_window = jax.jit(lambda batch: step.sum_loss(model, params, batch)[0])
  losses = []
  for batch in stream.held_out(
    cfg.data, cfg.train.seq_len, num_windows, batch_size=1
  ):
    losses.append(float(one_window(batch)) / batch["weights"].sum())
  return np.array(losses)


def summary(rows):
  gains = [row["gain_percent"] for row in rows]
  mean = statistics.mean(gains)
  half = 0.0
  if len(gains) == 3:
    half = STUDENT_T_2 * statistics.stdev(gains) / len(gains) ** 0.5
  return {
    "gain_percent": mean,
    "gain_low": mean - half,
    "gain_high": mean + half,
  }


def print_table(rows, figures):
  print("| seed | four learners | one learner | better by | contributors | H |")
  print("|---|---|---|---|---|---|")
  for row in rows:
    print(
      f"| {row['seed']} | {row['four']:.4f} | {row['lone']:.4f} |"
      f" {row['gain_percent']:.1f} % | {row['contributors_median']} |"
      f" {row['realised_h_median']:.1f} |"
    )
  print(
    f"mean gain {figures['gain_percent']:.2f} %, 95 % interval over seeds"
    f" {figures['gain_low']:.2f} to {figures['gain_high']:.2f} %"
  )
  print(
    f"imposed tape: {figures['imposed_merges']} merges, largest difference"
    f" {figures['imposed_error']:.2e} of the largest movement of a tensor"
  )


def local(run_dir, *overrides):
  call("ddiloco_jax.cli.local", f"--run_dir={run_dir}", *overrides)


def call(module, *flags):
  subprocess.run(
    [sys.executable, "-m", module, f"--config={CONFIG}", *flags],
    cwd=ROOT,
    check=True,
    stdout=sys.stderr,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )


def finish(path, run):
  """The absolute path of a run's directory, made anew if it is not whole."""
  path = path.resolve()
  if not (path / "done").exists():
    if path.exists():
      shutil.rmtree(path)
    run(path)
    (path / "done").touch()
  return path


def commit():
  return subprocess.run(
    ["git", "rev-parse", "--short", "HEAD"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  ).stdout.strip()


if __name__ == "__main__":
  main()
