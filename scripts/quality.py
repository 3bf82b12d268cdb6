"""Quality of a run, measured: the tables of docs/quality.md. Resumable.

  python scripts/quality.py --out=runs/quality --table=quality.md --json
  python scripts/quality.py --only=compare --config.outer.learning_rate=1.0

imposed: A real run of four learners, one killed and restarted; its tape imposed
    on arithmetic that is written apart must give the same parameters.
compare: For each seed, learners with a syncer; then, alone on the machine, one
    lone learner. That is plain training of as many steps as a learner of the
    others took on average, its cosine over so many, with the same first
    parameters, batch size and warm-up. Held-out loss over the same windows.

--config.SECTION.NAME=VALUE overrides a setting of both arms of `compare`. What
lies under --out with equal settings is not run again.
"""

import argparse
import dataclasses
import hashlib
import json
import logging
import pathlib
import statistics
import sys

import numpy as np
from absl import flags
from improvement import improvement, over_seeds, to_markdown
from resumable import commit, finish, once

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # For the tests' reference.
CONFIG = "configs/tiny.py"
SET_HERE = {
  "run.seed": "--seeds",
  "run.num_steps": "--steps",
  "sync.num_syncer_steps": "--steps",
  "train.decay_steps": "--steps",
  "evaluate.num_windows": "--windows",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
  """What all seeds of a comparison share.

  Attributes:
    steps: The syncer steps at which the learners' run ends.
    learners: How many learners the syncer has.
    windows: Held-out windows that both arms are evaluated over.
    overrides: --config.SECTION.NAME=VALUE, for both arms.
  """

  steps: int
  learners: int
  windows: int
  overrides: tuple[str, ...] = ()

  def flags(self, steps: int, seed: int = 0) -> tuple[str, ...]:
    """The flags of an arm whose learning rate decays over so many steps."""
    return (
      f"--config={CONFIG}",
      "--config.evaluate.every_steps=0",
      *self.overrides,
      f"--config.run.seed={seed}",
      f"--config.run.num_steps={steps}",
      f"--config.sync.num_syncer_steps={steps}",
      f"--config.train.decay_steps={steps}",
      f"--config.evaluate.num_windows={self.windows}",
    )

  def describe(self) -> str:
    """The settings as a line of a document."""
    overrides = "".join(f", `{text}`" for text in self.overrides)
    return (
      f"{self.learners} learners with a syncer to t = {self.steps} against a"
      f" lone one, {self.windows} held-out windows, `{CONFIG}`{overrides}:"
    )

  def key(self) -> str:
    """Names a directory: other settings of any kind have another one.

    Raises:
      ValueError: the overrides are none, or set what an option here sets.
    """
    from ddiloco_jax import config

    argv = ["", f"--config={ROOT / CONFIG}", *self.overrides]
    values = flags.FlagValues()
    config.define_flag(values, argv)
    if rest := values(argv)[1:]:
      raise ValueError(f"{rest[0]!r} is no option and no override")
    for name in config.overridden(values):
      if option := SET_HERE.get(name):
        raise ValueError(f"--config.{name} is not for both arms: use {option}")
    digest = config.digest(config.parsed(values))[:8]
    return f"{self.learners}x{self.steps}_{self.windows}_{digest}"


def main():
  args, study, key = parse()
  logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax has remarks.
  imposed, rows = {}, []
  if args.only != "compare":
    imposed = run_imposed(args.out)
  if args.only != "imposed":
    out = args.out / key
    rows = [
      once(out / f"seed_{n}.json", lambda n=n: compare(study, out, n))
      for n in range(args.seeds)
    ]
  text = to_markdown(study.describe(), rows, imposed)
  print(text)
  if args.table:
    args.table.write_text(text + "\n")
  if args.json:
    result = {
      "name": "quality",
      "figures": {"imposed": imposed, **over_seeds(rows), "seeds": rows},
      "settings": {"config": CONFIG, **dataclasses.asdict(study)},
      "commit": commit(),
    }
    print(json.dumps(result, allow_nan=False))


def parse():
  """The options, the comparison that they describe, and its key."""
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add("--out", type=pathlib.Path, default="runs/quality")
  add("--only", choices=("imposed", "compare"))
  add("--steps", type=int, default=600, help="of the syncer")
  add("--seeds", type=int, default=3, help="how many, from 0")
  add("--learners", type=int, default=4)
  add("--windows", type=int, default=512, help="held-out windows")
  add("--table", type=pathlib.Path, help="write the tables here, as markdown")
  add("--json", action="store_true", help="all figures as the last line")
  args, overrides = parser.parse_known_args()
  study = Comparison(
    steps=args.steps,
    learners=args.learners,
    windows=args.windows,
    overrides=tuple(overrides),
  )
  try:
    return args, study, study.key()
  except (ValueError, flags.Error) as error:
    parser.error(str(error))


def run_imposed(out):
  """A run with a kill against its reference, as the test has it."""
  from tests.run import test_imposed

  flags = (f"--config={CONFIG}", *test_imposed.FLAGS)
  settings = repr(flags).encode() + (ROOT / CONFIG).read_bytes()
  path = out / f"imposed_{hashlib.sha256(settings).hexdigest()[:8]}"

  def compare():
    run_dir = finish(path, "ddiloco_jax.cli.local", *flags)
    worst, num_merges = test_imposed.compare(run_dir)
    return {"largest_difference": float(worst), "num_merges": num_merges}

  return once(path.with_suffix(".json"), compare)


def compare(study, out, seed):
  """Both arms of one seed; losses are nats per token of the same windows."""
  run_dir = finish(
    out / f"learners_{seed}",
    "ddiloco_jax.cli.local",
    f"--learners={study.learners}",
    *study.flags(study.steps, seed),
  )
  summary = json.loads((run_dir / "summary.json").read_text())
  steps = list(summary["steps_by_learner"].values())
  lone_steps = round(statistics.mean(steps))
  lone_dir = finish(
    out / f"lone_{seed}", "ddiloco_jax.train", *study.flags(lone_steps, seed)
  )
  losses, lone_losses = window_losses(run_dir), window_losses(lone_dir)
  percent, error = improvement(losses, lone_losses)
  return {
    "seed": seed,
    "steps_by_learner": steps,
    "lone_steps": lone_steps,
    "loss": float(losses.mean()),
    "lone_loss": float(lone_losses.mean()),
    "improvement_percent": percent,
    "standard_error_percent": error,
    "contributors_mean": sum(summary["merges_by_learner"].values())
    / summary["num_merges"],
    "realised_h_mean": statistics.mean(h for h in summary["realised_h"] if h),
  }


def window_losses(run_dir):
  """Loss of a run's newest parameters on each held-out window, nats a token."""
  import jax

  from ddiloco_jax import config
  from ddiloco_jax.data import stream
  from ddiloco_jax.models import transformer
  from ddiloco_jax.training import step
  from ddiloco_jax.training.checkpoint import Checkpoints

  cfg = config.from_json((run_dir / "config.json").read_text())
  with Checkpoints(run_dir / "checkpoints", read_only=True) as saved:
    params = saved.restore(max(saved.steps()))["params"]
    params = jax.tree.map(jax.numpy.asarray, params)
  model = transformer.make_model(cfg.model)
  one_window = jax.jit(lambda batch: step.sum_loss(model, params, batch)[0])
  windows = stream.held_out(
    cfg.data, cfg.train.seq_len, cfg.evaluate.num_windows, batch_size=1
  )
  return np.array([float(one_window(w)) / w["weights"].sum() for w in windows])


if __name__ == "__main__":
  main()
