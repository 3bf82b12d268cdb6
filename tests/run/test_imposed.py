"""A real run's receipts give the same parameters in arithmetic written apart."""

import collections
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments
from ddiloco_jax.launch import syncing, training
from ddiloco_jax.models import transformer
from ddiloco_jax.training import checkpoint, step
from tests.references import imposed
from tests.support import receipts

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Everything that the reference must know is on the tape, but for the index of
# the learning rate, which is thus the learner's own step. Adam divides by the
# root of a moment: where that is near 0, an eps of 1e-8 blows a rounding error
# up to a whole step, and two orders of summation end up apart. A small learning
# rate keeps the two paths of a chaotic training together.
FLAGS = (
  "--learners=4",
  "--kill=1@20%:21%",
  "--config.sync.num_syncer_steps=150",
  "--config.run.lr_index=own",
  "--config.run.step_s=0.5",  # So that the killed one is back in time.
  "--config.train.eps=1e-4",
  "--config.train.learning_rate=1e-3",
  "--config.wire.up_format=float32",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_four_with_a_kill_equals_its_imposed_reference(tmp_path):
  run_dir = tmp_path / "run"
  subprocess.run(
    [
      sys.executable,
      "-m",
      "ddiloco_jax.cli.local",
      "--config=configs/tiny.py",
      *FLAGS,
      f"--run_dir={run_dir}",
    ],
    cwd=ROOT,
    check=True,
  )

  worst, merges = compare(run_dir)

  assert len(merges) >= 100
  assert worst < 2e-3
  merged = {who for _, _, inputs in merges for who, _, _ in inputs}
  assert len([who for who in merged if who.learner == "1"]) == 2


def compare(run_dir):
  """Returns (largest difference over the run's largest movement, merges).

  Merges are as in `receipts.Receipts`.
  """
  cfg = config.from_json((run_dir / "config.json").read_text())
  params = syncing.init_params(cfg)
  layout = fragments.make_layout(
    fragments.shapes_of(params),
    cfg.fragments.kind,
    cfg.fragments.num_fragments,
  )
  paths = {
    p: [leaf.path for leaf in layout.fragment(p)]
    for p in range(layout.num_fragments)
  }
  plan = receipts.read(run_dir / "tape.jsonl")
  versions = imposed.impose(
    params,
    paths,
    make_walkers(cfg, params, plan),
    plan.merges,
    optax.sgd(cfg.outer.learning_rate, cfg.outer.momentum, cfg.outer.nesterov),
    {"embedding", "head"},
  )
  final = read_final(run_dir)
  newest = {p: max(n for q, n in versions if q == p) for p in paths}
  worst = 0.0
  for p, n in newest.items():
    for path, want in versions[p, n].items():
      moved = np.abs(want - params[path]).max()
      worst = max(worst, np.abs(final[path] - want).max() / moved)
  return worst, plan.merges


def make_walkers(cfg, params, plan):
  model = transformer.make_model(cfg.model)

  def loss(params, batch):
    tree = fragments.unflatten(params)
    nats, (weight, _) = step.sum_loss(model, tree, batch)
    return nats / weight

  step_fn, init = imposed.make_step(loss, cfg.train)
  make_batches = training.batches_of(cfg, cfg.sync.num_shards)
  walkers = {}
  given = collections.defaultdict(set)
  for donor, at in plan.donors.values():
    given[donor].add(at)
  for who, (shard, first) in plan.positions.items():
    batches = make_batches(shard)
    donor, at = plan.donors.get(who, (None, 0))
    walkers[who] = imposed.Walker(
      {k: jnp.asarray(x) for k, x in params.items()},
      step_fn,
      init,
      plan.adoptions[who],
      plan.copies[who],
      lambda i, batches=batches, first=first: batches(first + i),
      given[who],
      (walkers[donor], at) if donor else None,
    )
  return walkers


def read_final(run_dir):
  with checkpoint.Checkpoints(run_dir / "checkpoints", read_only=True) as saved:
    tree = saved.restore(max(saved.steps()))["params"]
  return fragments.flatten(tree)
