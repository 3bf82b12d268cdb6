"""The flags of `cli/storm.py`, and the storms that they ask for."""

import argparse
import pathlib
import sys

from rich.console import Console

from ddiloco_jax.chaos.plan import KILLS_ONLY, MIX, ChaosConfig
from ddiloco_jax.launch import exits, local, plan, storm

MAX_SEEDS = 1000
MIXES = {"mix": MIX, "kills": KILLS_ONLY}


def make_parser(text: str | None) -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m ddiloco_jax.cli.storm",
    usage="%(prog)s --config=FILE [flags] [--config.SECTION.NAME=VALUE ...]",
    description=text,
    epilog="exit codes: 0 the verdict holds, 1 it does not, or there is none,"
    " 2 bad usage",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add("--config", required=True, metavar="FILE", help="a file of configs/")
  add("--learners", type=int, default=8, help="how many (default: 8)")
  add(
    "--faults_per_hour",
    type=float,
    default=600.0,
    help="of all learners together (default: 600)",
  )
  add("--minutes", type=float, default=5.0, help="of storm (default: 5)")
  add(
    "--syncer_kills",
    type=int,
    default=0,
    help="kills of the syncer, spread over the storm (default: 0)",
  )
  add(
    "--faults",
    choices=tuple(MIXES),
    default="mix",
    help="of what kinds: the whole mix, or kills only (default: mix)",
  )
  add(
    "--down_s",
    type=float,
    default=2.0,
    help="from a learner's kill to its next start (default: 2)",
  )
  add(
    "--numpy_learners",
    action="store_true",
    help="learners free of JAX, of a small model of their own, for many",
  )
  add(
    "--step_s",
    type=float,
    help="least time of a learner's step: sets run.step_s",
  )
  add("--seed", type=int, default=0, help="of the first storm (default: 0)")
  add(
    "--seeds",
    type=int,
    default=1,
    help="so many storms, each with its pair, one after the other (default: 1)",
  )
  add(
    "--fault_free",
    choices=("pair", "none"),
    default="pair",
    help="whether a run without faults follows each storm (default: pair)",
  )
  add("--json", action="store_true", help="end in a line of JSON on stdout")
  add(
    "--run_dir",
    type=pathlib.Path,
    help="directory of the storms (default: runs/CONFIG-DATE-TIME)",
  )
  return parser


def console(*, as_json: bool) -> Console:
  """Where people read; stdout is left to the JSON, if there is some."""
  return Console(soft_wrap=True, file=sys.stderr if as_json else sys.stdout)


def configs(
  flags: argparse.Namespace, overrides: tuple[str, ...]
) -> tuple[storm.StormConfig, ...]:
  """The storms that the flags ask for, one for each seed; nothing is written.

  Raises:
    BadUsage: flags that cannot be, or settings.
  """
  base = flags.run_dir or local.default_run_dir(flags.config)
  if base.exists():
    raise exits.BadUsage(f"--run_dir={base} exists: give a new directory")
  with exits.edge():
    if not 1 <= flags.seeds <= MAX_SEEDS:
      raise ValueError(
        f"--seeds={flags.seeds}: the number of storms is from 1 to {MAX_SEEDS};"
        " leave the flag out for one"
      )
    return tuple(
      _storm(flags, overrides, seed, base / f"seed-{seed}")
      for seed in range(flags.seed, flags.seed + flags.seeds)
    )


def _storm(
  flags: argparse.Namespace,
  overrides: tuple[str, ...],
  seed: int,
  directory: pathlib.Path,
) -> storm.StormConfig:
  from ddiloco_jax import config

  theta = directory / "theta.npz"
  run = plan.RunPlan(
    config=flags.config,
    run_dir=directory / "storm",
    num_learners=flags.learners,
    overrides=(*overrides, *_paced(flags), f"--config.run.seed={seed}"),
    owned=config.SYNCER_OWNED,
    numpy=plan.NumpyLearners(theta=theta) if flags.numpy_learners else None,
  )
  plan.plan_run(run)
  _check_settings(run)
  faults = ChaosConfig(
    seed=seed,
    num_learners=flags.learners,
    duration_s=60.0 * flags.minutes,
    faults_per_hour=flags.faults_per_hour,
    syncer_kills=flags.syncer_kills,
    mix=MIXES[flags.faults],
    down_s=flags.down_s,
  )
  pair = directory / "fault_free" if flags.fault_free == "pair" else None
  return storm.StormConfig(run=run, chaos=faults, pair_dir=pair)


def _check_settings(run: plan.RunPlan) -> None:
  """Refuses here what the syncer would, or a learner, once they are started."""
  from absl import flags as absl_flags

  from ddiloco_jax import config

  argv = ["storm", f"--{config.FLAG}={run.config}", *run.overrides]
  values = absl_flags.FlagValues()
  try:
    config.define_flag(values, argv)
    values(argv)
  except absl_flags.Error as error:
    raise ValueError(str(error)) from error
  most = config.parsed(values).sync.max_learners
  if run.num_learners > most:
    raise ValueError(
      f"--learners={run.num_learners}: no more join than"
      f" sync.max_learners={most}; give fewer, or raise it"
    )


def _paced(flags: argparse.Namespace) -> tuple[str, ...]:
  if flags.step_s is None:
    return ()
  return (f"--config.run.step_s={flags.step_s}",)
