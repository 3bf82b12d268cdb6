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
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ddiloco_jax.data import stream
from ddiloco_jax.data.sources import DataConfig
from ddiloco_jax.launch import exits, numpy_model
from ddiloco_jax.learner import peer
from ddiloco_jax.learner.client import Client
from ddiloco_jax.learner.learner import Learner, LearnerConfig
from ddiloco_jax.learner.link import Link
from ddiloco_jax.learner.patience import LinkConfig, Stopped, SyncerLost
from ddiloco_jax.learner.recovery import Recovery, RecoveryConfig
from ddiloco_jax.learner.seams import Batches
from ddiloco_jax.wire.options import WireConfig
from ddiloco_jax.wire.status import ServiceError

Settings = Mapping[str, Any]


def run_learner(flags: argparse.Namespace, settings: Settings) -> int:
  """Trains as one learner of a run until it ends; returns the exit code.

  Raises:
    BadUsage: text that is no bytes, a run of another model, or a token or
      certificate that cannot be used.
    SyncerLost, Stopped, ServiceError: as `Learner.train`.
  """
  asked_to_stop: list[int] = []
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: asked_to_stop.append(number))

  def should_stop() -> bool:
    return bool(asked_to_stop)

  run, wire = settings["run"], WireConfig(**settings["wire"])
  addresses = flags.syncer.split(",")
  name = flags.learner_id
  with exits.edge():
    client = Client(addresses, wire, learner=name)
    served = peer.serve_state(name, run["state_address"], addresses[0], wire)
  desk, server = served or (None, None)
  link = Link(
    client,
    name,
    LinkConfig(
      takeover=flags.takeover,
      connect_timeout_s=run["connect_timeout_s"],
      max_solo_s=run["max_solo_s"],
      reconnect_max_s=wire.reconnect_max_s,
      state_address=server.address if server else "",
    ),
    should_stop,
  )
  trainer = numpy_model.NumpyTrainer(settings["train"], run["step_s"])
  with exits.edge():
    make_batches = batches_of(settings, link.run.num_shards)
    _check_layout(link, trainer.params)
  learner = Learner(
    link,
    trainer,
    make_batches,
    LearnerConfig(
      lr_index=run["lr_index"],
      max_steps=run["max_steps"],
      loss_spike_factor=run["loss_spike_factor"],
    ),
    recovery=Recovery(
      client.open_state, desk, RecoveryConfig(patience_s=run["recover_s"])
    ),
  )
  try:
    reason = learner.train(should_stop)
  finally:
    if server:
      server.close()
  logging.info("learner %s ended: %s", name, reason)
  finished = link.finished()
  return finished.exit_code if finished else exits.OK


def batches_of(settings: Settings, num_shards: int) -> Callable[[int], Batches]:
  """Shard -> (position -> batch); as `data.stream`, with another shuffle.

  Raises:
    ValueError: text that cannot be read, is too short, or is no bytes.
  """
  train, seed = settings["train"], settings["run"]["seed"]
  cfg, rows = DataConfig(**settings["data"]), train["batch_size"]
  if stream.vocab_size(cfg) > numpy_model.VOCAB:
    raise ValueError(
      f"data.tokenizer is {cfg.tokenizer!r}: the model of --numpy_learners"
      " reads 'bytes'"
    )
  windows = stream.training_windows(cfg, train["seq_len"])

  def make(shard: int) -> Batches:
    ids = np.arange(shard, windows.num_windows, num_shards)
    per_epoch = len(ids) // rows
    if not per_epoch:
      raise ValueError(
        f"shard {shard} of {num_shards} has {len(ids)} windows and a batch"
        f" needs {rows}: give more text, or fewer sync.num_shards"
      )

    def batch(position: int) -> Mapping[str, np.ndarray] | None:
      epoch, place = divmod(position, per_epoch)
      if cfg.num_epochs is not None and epoch >= cfg.num_epochs:
        return None
      order = np.random.default_rng([seed, shard, epoch]).permutation(ids)
      return windows.take(order[place * rows : (place + 1) * rows])

    return batch

  return make


def _check_layout(link: Link, params: numpy_model.Params) -> None:
  leaves = link.run.layout.leaves
  theirs = {leaf.path: tuple(leaf.shape) for leaf in leaves}
  if theirs != {path: x.shape for path, x in params.items()}:
    raise ValueError(
      f"the run's parameters are {sorted(theirs)}, and not those of"
      " launch/numpy_model.py: give them to the syncer by --layout_arrays"
    )


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
  flags = _make_parser().parse_args(argv)
  logging.basicConfig(
    level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
  )
  try:
    path = flags.run_dir / "config.json"
    return run_learner(flags, json.loads(path.read_text("utf-8")))
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
