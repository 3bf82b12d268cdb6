"""What failing chips would do to a run, in virtual time.

  python -m ddiloco_jax.cli.simulate --config=configs/sim/table1.py
  python -m ddiloco_jax.cli.simulate --config=configs/sim/single.py \\
    --config.fleet.chips=2400000 --config.learners.num=16

The config names a study (run.study) and the scenario that it is played in;
--config.SECTION.NAME=VALUE changes a setting. The syncer decides by the same
state machine as a real one. See docs/simulator.md.
"""

import sys

from rich.console import Console

from ddiloco_jax.launch import exits, simulating


def main(argv: list[str] | None = None) -> int:
  parser = simulating.make_parser(__doc__)
  flags, overrides = parser.parse_known_args(argv)
  if flags.processes < 1:
    parser.error(f"--processes={flags.processes}: give at least 1")
  console = Console(soft_wrap=True, stderr=True)
  try:
    scenario = simulating.read_scenario(flags.config, tuple(overrides))
    told = simulating.play(scenario, flags.processes, console)
  except ValueError as error:
    parser.error(str(error))
  if flags.json:
    print(simulating.to_json(told))
  else:
    Console(soft_wrap=True, highlight=False).print(simulating.to_text(told))
  return exits.OK


def run() -> None:
  """Console entry point."""
  sys.exit(main())


if __name__ == "__main__":
  run()
