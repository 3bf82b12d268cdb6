"""A storm of failures over a whole run on this machine, and a verdict.

  python -m ddiloco_jax.cli.storm --config=configs/storm_tiny.py \\
    --learners=8 --faults_per_hour=600 --minutes=5 --syncer_kills=3

Starts a syncer and its learners, waits for everybody's first step, and does a
seeded plan of faults to them: kills, stops, partitions, slow links, full disks,
jumping clocks. The dead are started again. Then the same without faults, to as
many merged tokens. Exit code 0 only if the verdict holds; see docs/chaos.md.
"""

import sys

from ddiloco_jax.launch import exits, local, storm, storm_flags


def main(argv: list[str] | None = None) -> int:
  parser = storm_flags.make_parser(__doc__)
  flags, overrides = parser.parse_known_args(argv)
  screen = local.Screen(storm_flags.console(as_json=flags.json))
  requests = local.StopRequests()
  requests.catch()
  seeds = []
  try:
    for cfg in storm_flags.configs(flags, tuple(overrides)):
      seeds.append(storm.weather(cfg, requests, screen))
  except exits.BadUsage as error:
    parser.error(str(error))
  except (storm.Failed, exits.WriteFailed, ValueError) as error:
    screen.say(f"there is no verdict: {error}")
    return exits.FAILED
  holds = storm.conclude(seeds, screen.say, as_json=flags.json)
  return exits.OK if holds else exits.FAILED


def run() -> None:
  """Console entry point."""
  sys.exit(main())


if __name__ == "__main__":
  run()
