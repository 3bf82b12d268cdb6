"""The synchronizer of a run.

  python -m ddiloco_jax.cli.syncer --config=configs/tiny.py --run_dir=runs/a

It prints and writes to RUN_DIR/address where it serves, and ends when the run
does. With --standby it waits until the syncer of the run is gone, and takes over. Exit codes: 0 the run ended well, 1 failure, 2 bad usage or config, 4 too
few learners for sync.quorum_timeout_s, 6 address or directory in use, 7 a
commit or a checkpoint could not be written, 8 another syncer has taken over.
"""

import contextlib
import dataclasses
import logging
import pathlib
from typing import TYPE_CHECKING

from absl import flags

from ddiloco_jax.launch import exits, signals

if TYPE_CHECKING:
  from ddiloco_jax.syncer.exporter import Exporter

_ADDRESS = flags.DEFINE_string(
  "address",
  "127.0.0.1:8470",
  "HOST:PORT to listen on; port 0 takes a free one.",
)
_RUN_DIR = flags.DEFINE_string(
  "run_dir", None, "The run's directory; config.run.directory if not given."
)
_RESTORE = flags.DEFINE_bool(
  "restore", False, "Go on from the newest checkpoint in the run's directory."
)
_SNAPSHOT = flags.DEFINE_string(
  "snapshot",
  None,
  "OLD_RUN_DIR/snapshots/ID, or /latest: a new run in --run_dir goes on from it.",
)
_STANDBY = flags.DEFINE_bool(
  "standby",
  False,
  "Take over the run in the directory once its syncer is gone; both have"
  " run.standby_lease_s.",
)
_ARRAYS = flags.DEFINE_string(
  "layout_arrays",
  None,
  "An .npz of arrays named by tree path: Theta 0 of a model that is not ours.",
)
_RECORD_PAYLOADS = flags.DEFINE_bool(
  "record_payloads",
  False,
  "Keep what a replay of the tensors needs; run.record_payloads.",
)
_METRICS_PORT = flags.DEFINE_integer(
  "metrics_port",
  None,
  "Serve Prometheus metrics there; 0 takes a free port, and the log says which.",
  lower_bound=0,
  upper_bound=65535,
)
_METRICS_HOST = flags.DEFINE_string(
  "metrics_host", "127.0.0.1", "Where --metrics_port listens; no TLS, no token."
)


def main() -> int:
  with exits.edge():
    if _STANDBY.value and _RESTORE.value:
      raise ValueError(
        "--standby and --restore were both given: the one waits until the"
        " run's syncer is gone, and then restores; the other restores now."
        " Leave one of them out."
      )
  # Imported here: the flags above are checked before all of JAX is loaded.
  from ddiloco_jax import config
  from ddiloco_jax.launch import arrays, process, serving, standby

  with exits.edge():
    cfg = config.parsed()
    if _RECORD_PAYLOADS.value:
      run = dataclasses.replace(cfg.run, record_payloads=True)
      cfg = dataclasses.replace(cfg, run=run)
    theta = arrays.load_arrays(_ARRAYS.value) if _ARRAYS.value else None
  start = serving.Start(
    cfg,
    pathlib.Path(_RUN_DIR.value or cfg.run.directory),
    theta,
    pathlib.Path(_SNAPSHOT.value) if _SNAPSHOT.value else None,
    on_lost=lambda lost: process.end_soon(lost, cfg.run.standby_lease_s / 2),
  )
  stop = signals.stop_on_signals()
  with contextlib.ExitStack() as stack:
    # First, as the address: a port that is taken leaves no run behind.
    metrics = _exporter(stack)
    if _STANDBY.value:
      turn = standby.standing_by(start, _ADDRESS.value, stop.reason, _say_ready)
    else:
      turn = serving.serving(start, _ADDRESS.value, restore=_RESTORE.value)
    try:
      served = stack.enter_context(turn)
    except standby.StoodDown as done:
      logging.info("stands by no more: %s", done)
      return done.exit_code
    if metrics is not None:
      metrics.watch(served.run.syncer.status)
      logging.info("metrics are at http://%s/metrics", metrics.address)
    print(f"syncer serves at {served.address}", flush=True)
    finished = served.run.run(stop.reason)
  logging.info("the run ended: %s", finished.reason)
  return finished.exit_code


def _say_ready(address: str) -> None:
  print(f"syncer stands by at {address}", flush=True)


def _exporter(stack: contextlib.ExitStack) -> "Exporter | None":
  if _METRICS_PORT.value is None:
    return None
  from ddiloco_jax.syncer.exporter import Exporter

  made = Exporter(_METRICS_HOST.value, _METRICS_PORT.value)
  stack.callback(made.close)
  return made


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
