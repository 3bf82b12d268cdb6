"""The training of a learner process that is free of JAX: see `numpy_learner`."""

import argparse
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ddiloco_jax.data import stream
from ddiloco_jax.data.sources import DataConfig
from ddiloco_jax.launch import exits, numpy_model, signals
from ddiloco_jax.learner import peer
from ddiloco_jax.learner.client import Client
from ddiloco_jax.learner.learner import Learner, LearnerConfig
from ddiloco_jax.learner.link import Link
from ddiloco_jax.learner.patience import LinkConfig
from ddiloco_jax.learner.recovery import Recovery, RecoveryConfig
from ddiloco_jax.learner.seams import Batches
from ddiloco_jax.wire.options import WireConfig

Settings = Mapping[str, Any]


def run_learner(flags: argparse.Namespace, settings: Settings) -> int:
  """Trains as one learner of a run until it ends; returns the exit code.

  Raises:
    BadUsage: text that is no bytes, a run of another model, or a token or
      certificate that cannot be used.
    SyncerLost, Stopped, ServiceError: as `Learner.train`.
  """
  should_stop = signals.stop_on_signals()
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
