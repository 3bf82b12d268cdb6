"""Replays a run from its tapes, and checks that it comes out the same.

  python -m ddiloco_jax.cli.replay RUN/tape.jsonl
  python -m ddiloco_jax.cli.replay RUN --theta --out=DIR
  python -m ddiloco_jax.cli.replay RUN --learner=0

Without flags it re-steps the protocol over a tape, or over all of a run's, and
checks every decision. With --theta it also does every merge again, from the
replies of a run with --record_payloads, and compares every version bit by bit;
with --learner it trains that learner again, step by step.

Exit codes: 0 the replay is equal, also if the last line is torn; 1 it differs
(the line, or the first version, is named), or not all of it was recorded; 2 a
file is missing, damaged, or no tape, or --out cannot be written.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ddiloco_jax.protocol import machine, tape
from ddiloco_jax.report.chronicle import tapes_of


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="ddiloco-replay",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("tape", type=pathlib.Path, help="a run's directory, or one tape.jsonl")
  add("--json", action="store_true", help="print one JSON object a tape")
  add("--theta", action="store_true", help="do every merge again, too")
  add("--learner", metavar="ID", help="train this learner again, too")
  add(
    "--out",
    type=pathlib.Path,
    metavar="DIR",
    help="with --theta or --learner: write its parameters to DIR/params.npz",
  )
  return parser


def main(arguments: list[str] | None = None) -> int:
  parser = make_parser()
  flags = parser.parse_args(arguments)
  if flags.out and (flags.theta == bool(flags.learner)):
    parser.error("--out writes what one of --theta and --learner replays")
  if flags.out and flags.out.is_file():
    parser.error(f"--out={flags.out} is a file: give a directory to write to")
  if (flags.theta or flags.learner) and not flags.tape.is_dir():
    parser.error(
      f"--theta and --learner need a run's directory, and {flags.tape} is none"
    )
  try:
    paths = tapes_of(flags.tape) if flags.tape.is_dir() else [flags.tape]
    code = 0
    for path in paths:
      code = max(code, _replay(path, as_json=flags.json))
    if flags.theta and not code:
      code = _replay_theta(flags.tape, flags.out, as_json=flags.json)
    if flags.learner and not code:
      code = _replay_learner(
        flags.tape, flags.learner, flags.out, as_json=flags.json
      )
  except OSError as error:
    print(
      f"cannot read {error.filename or flags.tape}: {error.strerror}; give the"
      " tape.jsonl of a run directory",
      file=sys.stderr,
    )
    return 2
  except ValueError as error:
    print(error, file=sys.stderr)
    return 2
  return code


def _replay(path: pathlib.Path, *, as_json: bool) -> int:
  result = tape.replay(path)
  print(_as_json(result) if as_json else _as_text(result))
  return 1 if result.faults else 0


def _replay_theta(
  run_dir: pathlib.Path, out: pathlib.Path | None, *, as_json: bool
) -> int:
  from ddiloco_jax.launch import replaying  # It loads JAX.

  replay = replaying.ThetaReplay(run_dir)
  for _ in replay.versions():
    pass
  if out is not None and replay.theta:
    _write(out, replay.theta)
  values = {
    "num_epochs": replay.num_epochs,
    "num_merges": replay.num_merges,
    "num_compared": replay.num_compared,
    "num_checkpoints": replay.num_checkpoints,
  }
  said = (
    f"{replay.num_merges} merges of {replay.num_epochs} epoch(s) done again;"
    f" {replay.num_compared} digests and {replay.num_checkpoints} checkpoints"
    " compared"
  )
  same = "equal: every version has the bits of the run's own"
  print(_said(replay, values) if as_json else _told(replay, said, same))
  return 1 if replay.faults or replay.gaps else 0


def _replay_learner(
  run_dir: pathlib.Path,
  learner: str,
  out: pathlib.Path | None,
  *,
  as_json: bool,
) -> int:
  from ddiloco_jax.launch import retracing  # It loads JAX.

  replay = retracing.LearnerReplay(run_dir, learner)
  replay.run()
  if out is not None:
    _write(out, [replay.params])
  values = {
    "learner": learner,
    "num_processes": replay.num_processes,
    "num_steps": replay.num_steps,
    "num_ends": replay.num_ends,
  }
  said = (
    f"learner {learner}: {replay.num_steps} steps of {replay.num_processes}"
    f" process(es) done again; the last parameters of {replay.num_ends} compared"
  )
  same = "equal: every step has the numbers of the learner's own"
  print(_said(replay, values) if as_json else _told(replay, said, same))
  return 1 if replay.faults or replay.gaps else 0


def _write(out: pathlib.Path, parts: Iterable[Mapping[str, Any]]) -> None:
  """Writes what was replayed.

  Raises:
    ValueError: it cannot be written there.
  """
  from ddiloco_jax.launch import arrays  # It loads JAX.

  try:
    arrays.save_arrays(out / "params.npz", parts)
  except OSError as error:
    raise ValueError(
      f"cannot write --out={out}: {error.strerror}; give a directory that can"
      " be made or written"
    ) from error


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


def _said(replay: Any, values: dict[str, Any]) -> str:
  result = {
    "equal": not (replay.faults or replay.gaps),
    "faults": replay.faults,
    "gaps": replay.gaps,
    "notes": replay.notes,
    **values,
  }
  return json.dumps(result, allow_nan=False)


def _told(replay: Any, said: str, same: str) -> str:
  lines = [
    said,
    *(f"note: {note}" for note in replay.notes),
    *(f"DIFFERS: {fault}" for fault in replay.faults),
    *(f"LACKS: {gap}" for gap in replay.gaps),
  ]
  if not (replay.faults or replay.gaps):
    lines.append(same)
  return "\n".join(lines)


def run() -> None:
  """Entry point of the console script."""
  sys.exit(main())


if __name__ == "__main__":
  run()
