"""One learner of five attacks: who merges robustly reaches the honest target.

Real gRPC, numpy learners on a quadratic. Every attack keeps within what the
outlier guard lets pass (10 times the others' norm), so that the merge alone
stands between the attacker and Theta.
"""

import numpy as np
import pytest

from ddiloco_jax.algorithm.merge import MergeConfig
from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.rules import Rules
from tests.support.numpy_learner import HONEST, NumpyLearner, Spoil
from tests.support.served import Served, wait_for

THETA = {
  "a": np.zeros((5, 8), np.float32),
  "b": np.zeros((40,), np.float32),
}
# Of the honest; never met by all, so that deltas keep an ordinary length.
TARGETS = (0.94, 0.97, 1.03, 1.06)
NUM_MERGES = 16
LENGTH = 6.0  # Of an attack, in honest norms.


def random_direction():
  """Drawn once: a new one in every reply would cancel in part."""

  def spoil(delta):
    rng = np.random.default_rng(0)
    noise = {p: rng.normal(size=x.shape) for p, x in delta.items()}
    length = np.sqrt(sum(np.sum(x**2) for x in noise.values()))
    honest = np.sqrt(sum(np.sum(x.astype(float) ** 2) for x in delta.values()))
    scale = LENGTH * honest / length
    return {p: np.float32(scale * x) for p, x in noise.items()}

  return Spoil(delta=spoil)


def multiple(factor):
  return Spoil(
    delta=lambda delta: {p: np.float32(factor) * x for p, x in delta.items()}
  )


ATTACKS = {
  "flipped": lambda: multiple(-1.0),
  "long": lambda: multiple(LENGTH),
  "long_and_flipped": lambda: multiple(-LENGTH),
  "random_direction": random_direction,
}


def distance_after(direction, attack, beyond=0.0):
  """The largest distance from the honest mean, after so many merges of each.

  Args:
    beyond: Go on until the distance is more than this.
  """
  rules = Rules(num_fragments=2, cycle_steps=4, quorum=4, lease_s=10.0)
  cfg = MergeConfig(direction=direction, average_paths=())
  served = Served(THETA, rules, merge_cfg=cfg)
  targets = (*TARGETS, 1.04)
  crew = [
    NumpyLearner(served.client(str(i)), str(i), target=target, rate=0.4)
    for i, target in enumerate(targets)
  ]
  crew[-1].spoil = attack

  def distance():
    tensors, _ = served.syncer.snapshot()
    theta = [x for part in tensors.theta for x in part.values()]
    return max(float(np.abs(x - np.mean(TARGETS)).max()) for x in theta)

  def is_done():
    merges = [e.fragment for e in served.all_of(events.Merge)]
    enough = min(merges.count(0), merges.count(1)) >= NUM_MERGES
    return enough and distance() >= beyond

  try:
    for learner in crew:
      learner.start()
    wait_for(is_done, 60.0)
    included = [
      item.key.learner
      for effect in served.all_of(events.Merge)
      for item in effect.inputs
    ]
    assert included.count(str(len(TARGETS))) >= NUM_MERGES // 2
    return distance()
  finally:
    for learner in crew:
      learner.kill()
    served.close()


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("direction", ["clipped", "trimmed_mean", "ties"])
def test_a_robust_merge_reaches_the_honest_target(direction, attack):
  assert distance_after(direction, ATTACKS[attack]()) <= 0.25


@pytest.mark.parametrize("attack", ["long_and_flipped", "random_direction"])
def test_an_average_does_not(attack):
  # Theta began at a distance of 1, and is led away from there.
  assert distance_after("average", ATTACKS[attack](), beyond=2.0) >= 2.0


def test_without_an_attack_each_reaches_it():
  for direction in ("average", "clipped", "trimmed_mean", "ties"):
    assert distance_after(direction, HONEST) <= 0.2
