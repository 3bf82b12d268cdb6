"""A learner process that is free of JAX, for fleets on one machine.

  python -m ddiloco_jax.launch.numpy_learner --syncer=HOST:PORT --learner_id=0 \\
    --run_dir=RUN_DIR

It trains `launch/numpy_model.py` in the project's own loop, over its own link,
with the settings that the syncer wrote to RUN_DIR/config.json. Nothing of it is
saved: what a restarted one lacks, a peer gives it. For storms
(`cli.storm --numpy_learners`).
"""

import argparse
import json
import logging
import pathlib
import sys

from ddiloco_jax.launch import exits, signals


def _make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m ddiloco_jax.launch.numpy_learner",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add("--syncer", required=True, help="HOST:PORT[,HOST:PORT]")
  add("--learner_id", required=True, help="its name in the run")
  add("--run_dir", required=True, type=pathlib.Path, help="of the syncer")
  add("--takeover", action="store_true", help="fence a process of this id")
  return parser


def main(argv: list[str] | None = None) -> int:
  signals.end_at_once()
  flags = _make_parser().parse_args(argv)
  # Imported now: they take seconds on a busy machine.
  from ddiloco_jax.launch import numpy_training
  from ddiloco_jax.learner.patience import Stopped, SyncerLost
  from ddiloco_jax.wire.status import ServiceError

  logging.basicConfig(
    level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
  )
  try:
    path = flags.run_dir / "config.json"
    return numpy_training.run_learner(
      flags, json.loads(path.read_text("utf-8"))
    )
  except Stopped as stopped:
    print(stopped, flush=True)
    return exits.OK
  except SyncerLost as error:
    code, message = exits.NO_SYNCER, str(error)
  except ServiceError as error:
    code = exits.FENCED if error.code == "ABORTED" else exits.FAILED
    message = str(error)
  except (OSError, exits.BadUsage) as error:
    code, message = exits.BAD_USAGE, str(error)
  print(f"error: {message}", file=sys.stderr, flush=True)
  return code


if __name__ == "__main__":
  sys.exit(main())
