"""Replays a run's tape: re-steps the protocol and checks every decision.

  python -m ddiloco_jax.cli.replay RUN/tape.jsonl

Exit codes: 0 the replay is equal, also if the last line is torn; 1 it differs
(the line is named); 2 the file is missing, damaged, or no tape.
"""

import argparse
import json
import sys

from ddiloco_jax.protocol import machine, tape


def main(arguments: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog="ddiloco-replay",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("tape", help="tape.jsonl of a run directory")
  parser.add_argument(
    "--json", action="store_true", help="print one JSON object instead"
  )
  flags = parser.parse_args(arguments)
  try:
    result = tape.replay(flags.tape)
  except OSError as error:
    print(
      f"cannot read {flags.tape}: {error.strerror}; give the tape.jsonl of a "
      "run directory",
      file=sys.stderr,
    )
    return 2
  except tape.TapeError as error:
    print(error, file=sys.stderr)
    return 2
  print(_as_json(result) if flags.json else _as_text(result))
  return 1 if result.faults else 0


def _as_json(result: tape.ReplayResult) -> str:
  values = {
    "equal": not result.faults,
    "faults": list(result.faults),
    "num_events": result.num_events,
    "num_epochs": result.num_epochs,
    "t": result.state.t,
    "versions": [f.version.n for f in result.state.fragments],
    "digest": machine.digest(result.state),
    "torn": result.torn,
    "closed": result.closed,
  }
  return json.dumps(values, allow_nan=False)


def _as_text(result: tape.ReplayResult) -> str:
  state = result.state
  num_merges = sum(f.num_merges for f in state.fragments)
  lines = [
    f"{result.num_events} events of {result.num_epochs} epoch(s) replayed: "
    f"t = {state.t}, {num_merges} merges",
    f"digest of the last state: {machine.digest(state)}",
  ]
  if result.torn:
    lines.append(
      "the last line is torn: the syncer was killed while writing it; all "
      "before it was replayed"
    )
  elif not (result.closed or result.faults):
    lines.append("the tape has no end line: the syncer was killed, or runs")
  lines += [f"DIFFERS: {fault}" for fault in result.faults]
  if not result.faults:
    lines.append("equal: every decision is the one on the tape")
  return "\n".join(lines)


def run() -> None:
  """Entry point of the console script."""
  sys.exit(main())


if __name__ == "__main__":
  run()
