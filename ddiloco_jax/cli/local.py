"""A whole run on this machine: a syncer and its learners, as processes.

  python -m ddiloco_jax.cli.local --config=configs/tiny.py --learners=4 \\
    --kill=1@33%:66%

It starts all of them, shows them live, evaluates the result at the end, and
writes report.html and summary.json into the run's directory. Ctrl-C ends the
run in order; a second one at once. During the evaluation it leaves that out;
once more leaves out the summary too, and the exit code is 1.
"""

import argparse
import pathlib
import sys

from rich.console import Console

from ddiloco_jax.launch import exits, failures, local, plan
from ddiloco_jax.launch.run import RESTARTS, LaunchConfig, Run
from ddiloco_jax.syncer import manifest


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m ddiloco_jax.cli.local",
    usage="%(prog)s --config=FILE [flags] [--config.SECTION.NAME=VALUE ...]",
    description=__doc__,
    epilog="exit codes (a failed process's own, the syncer's first):\n"
    + exits.table(),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add("--config", required=True, metavar="FILE", help="a file of configs/")
  add("--learners", type=int, default=4, help="how many (default: 4)")
  add(
    "--kill",
    action="append",
    default=[],
    metavar="LEARNER@TIME[:RESTART]",
    help="SIGKILL a learner (or 'syncer') at TIME, start it again at RESTART;"
    " seconds since the syncer serves, or %% of sync.num_syncer_steps;"
    " may be given more than once",
  )
  add(
    "--restart",
    choices=RESTARTS,
    default="never",
    help="start again what failed or was killed (default: never)",
  )
  add(
    "--run_dir",
    type=pathlib.Path,
    help="the run's directory (default: runs/CONFIG-DATE-TIME)",
  )
  add(
    "--address",
    default="127.0.0.1:0",
    help="where the syncer listens (default: a free port of 127.0.0.1)",
  )
  add(
    "--restore",
    action="store_true",
    help="go on with the run that is in --run_dir",
  )
  add(
    "--snapshot",
    type=pathlib.Path,
    metavar="OLD_RUN_DIR/snapshots/ID",
    help="begin a new run from this snapshot of another one; latest for ID",
  )
  add(
    "--record_payloads",
    action="store_true",
    help="keep what a replay of the tensors needs (cli.replay --theta)",
  )
  return parser


def main(argv: list[str] | None = None) -> int:
  requests = local.StopRequests()
  requests.catch()  # First: what follows may import for seconds.
  parser = make_parser()
  flags, overrides = parser.parse_known_args(argv)
  if flags.record_payloads:
    overrides.append("--config.run.record_payloads=true")
  run_dir = flags.run_dir or local.default_run_dir(flags.config)
  screen = local.Screen(Console(soft_wrap=True))
  try:
    kills = tuple(failures.parse_kill(k, flags.learners) for k in flags.kill)
    cut = manifest.find(flags.snapshot) if flags.snapshot else None
    processes = plan.plan_run(
      plan.RunPlan(
        config=flags.config,
        run_dir=run_dir,
        num_learners=flags.learners,
        address=flags.address,
        overrides=tuple(overrides),
        owned=owned_names() if overrides else (),
        restore=flags.restore,
        snapshot=cut,
      )
    )
    policy = LaunchConfig(restart=flags.restart)
  except ValueError as error:
    parser.error(str(error))
  run = Run(processes, run_dir, policy, kills, say=screen.say)
  try:
    code = local.drive(run, kills, requests, screen)
  except exits.BadUsage as error:
    parser.error(str(error))
  if not run.address:
    return code  # The directory's records, if any, are another run's.
  concluded = local.conclude(run_dir, requests, screen)
  return code or concluded


def owned_names() -> tuple[str, ...]:
  """Imported only if there are overrides: the config's sections load JAX."""
  from ddiloco_jax import config

  return config.SYNCER_OWNED


def run() -> None:
  """Console entry point."""
  sys.exit(main())


if __name__ == "__main__":
  run()
