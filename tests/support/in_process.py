"""Runs in one process: a real SyncerRun and learner threads on its object."""

import contextlib
import threading

from ddiloco_jax.launch import syncing
from ddiloco_jax.learner.learner import Learner, LearnerConfig
from ddiloco_jax.learner.link import Link
from ddiloco_jax.learner.patience import LinkConfig


@contextlib.contextmanager
def syncer_run(cfg, run_dir, **kwargs):
  run = syncing.SyncerRun(cfg, str(run_dir), **kwargs)
  try:
    yield run
  finally:
    run.close()


def train_all(run, trainers, make_batches, cfg=None, timeout_s=60.0):
  """Trains one learner per trainer until the run ends; returns how it did.

  Raises:
    Exception: what ended a learner.
  """
  errors = []

  def train(name, trainer):
    link = Link(run.syncer, name, LinkConfig(connect_timeout_s=10))
    try:
      Learner(link, trainer, make_batches, cfg or LearnerConfig()).train()
    except BaseException as error:
      errors.append(error)
      link.leave("failed")

  threads = [
    threading.Thread(target=train, args=(str(m), trainer), daemon=True)
    for m, trainer in enumerate(trainers)
  ]
  for thread in threads:
    thread.start()
  waited = threading.Timer(timeout_s, run.syncer.request_stop, ["timed out"])
  waited.start()
  finished = run.run(lambda: "a learner failed" if errors else None)
  waited.cancel()
  for thread in threads:
    thread.join(timeout=30)
  if errors:
    raise errors[0]
  return finished
