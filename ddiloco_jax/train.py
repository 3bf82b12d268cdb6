"""A learner of a run, or plain training without --syncer.

  python -m ddiloco_jax.train --config=configs/tiny.py --syncer=HOST:PORT \\
    --learner_id=0
  python -m ddiloco_jax.train --config=configs/data_parallel.py

Settings are overridden by --config.SECTION.NAME=VALUE; what all learners must
agree on is set at the syncer. Exit codes: 0 the run ended well, 1 failure, 2
bad usage, config or data, 3 another process took this learner's id, 5 no
syncer was there, 9 it hung for run.stuck_s.
"""

import logging
import pathlib

from absl import flags

from ddiloco_jax.launch import exits, signals

_SYNCER = flags.DEFINE_string(
  "syncer",
  None,
  "HOST:PORT[,HOST:PORT] of the syncer; without it, plain training.",
)
_LEARNER_ID = flags.DEFINE_string(
  "learner_id", "0", "This learner's name in the run: unique among the living."
)
_TAKEOVER = flags.DEFINE_bool(
  "takeover", False, "Fence a process that has this id and still lives."
)
_RESTORE = flags.DEFINE_bool(
  "restore", False, "Go on from this process's newest checkpoint."
)
_SNAPSHOT = flags.DEFINE_string(
  "snapshot",
  None,
  "RUN_DIR/snapshots/ID: go on from this learner's part of it, in a run whose"
  " syncer was started from the same.",
)
_RUN_DIR = flags.DEFINE_string(
  "run_dir", None, "Where to write; config.run.directory if not given."
)


def main() -> int:
  from ddiloco_jax import config
  from ddiloco_jax.launch import process, watchdog
  from ddiloco_jax.wire.status import ServiceError

  with exits.edge():
    cfg = config.parsed()
  run_dir = pathlib.Path(_RUN_DIR.value or cfg.run.directory)
  should_stop = watchdog.Watchdog(cfg.run.stuck_s, signals.stop_on_signals())
  # Imported here: the flags above are checked before all of JAX is loaded.
  from ddiloco_jax.launch import training

  if _SYNCER.value is None:
    with exits.edge():
      if _SNAPSHOT.value:
        raise ValueError(
          f"--snapshot={_SNAPSHOT.value} without --syncer: plain training has"
          " checkpoints only. Use --restore."
        )
    loss = training.run_plain(cfg, run_dir, should_stop, restore=_RESTORE.value)
    print(f"held-out loss {loss:.4f} nats per token; run directory {run_dir}")
    return 0
  with exits.edge():
    process.refuse_owned(config.syncer_owned(config.overridden()))
    joint = process.join(
      cfg, _SYNCER.value, _LEARNER_ID.value, _TAKEOVER.value, should_stop
    )
  directory = run_dir / "learners" / _LEARNER_ID.value
  try:
    reason = training.run_learner(
      cfg,
      joint.link,
      directory,
      should_stop,
      restore=_RESTORE.value,
      recovery=joint.recovery,
      snapshot=pathlib.Path(_SNAPSHOT.value) if _SNAPSHOT.value else None,
    )
  except ServiceError as error:
    if not joint.is_too_late(error):
      raise
    print(f"learner {_LEARNER_ID.value} is too late: {error.text}", flush=True)
    return exits.OK
  finally:
    joint.close()
  logging.info("learner %s ended: %s", _LEARNER_ID.value, reason)
  finished = joint.link.finished()
  return finished.exit_code if finished else exits.OK


def run() -> None:
  """Console entry point."""
  signals.end_at_once()
  # Imported now: they take seconds.
  from ddiloco_jax import config
  from ddiloco_jax.launch import process

  config.define_flag()
  process.run(main, __doc__)


if __name__ == "__main__":
  run()
