"""The byte model of learners without JAX: its gradient, its trainer, its data."""

import numpy as np
import pytest

from ddiloco_jax.launch import numpy_model, numpy_training
from ddiloco_jax.learner.seams import Trainer

TRAIN = {
  "batch_size": 4,
  "seq_len": 16,
  "learning_rate": 1e-2,
  "warmup_steps": 4,
  "rewarm_steps": 2,
  "b1": 0.9,
  "b2": 0.95,
  "eps": 1e-8,
  "weight_decay": 0.1,
  "clip_norm": 1.0,
}


@pytest.fixture
def text(tmp_path):
  lines = [f"{n * 7919 % 10007:05d}, {n}\n" for n in range(8000)]
  (tmp_path / "text.txt").write_text("".join(lines))
  return str(tmp_path / "text.txt")


def make_batches(text, num_shards=3, num_epochs=None, seed=0):
  data = {"source": text, "piece_bytes": 1000, "num_epochs": num_epochs}
  settings = {"data": data, "train": TRAIN, "run": {"seed": seed}}
  return numpy_training.batches_of(settings, num_shards)


def test_the_gradient_is_that_of_the_loss(text):
  batch = dict(make_batches(text)(0)(0))
  batch["weights"][0, 5:] = 0.0  # Padding counts for nothing.
  params = {
    path: x.astype(np.float64) for path, x in numpy_model.init_params(3).items()
  }
  draws = np.random.default_rng(0)
  value, gradient = numpy_model.loss_and_gradient(params, batch)

  assert value == pytest.approx(numpy_model.loss(params, [batch]))
  for path, x in params.items():
    way = draws.standard_normal(x.shape)
    sides = [
      numpy_model.loss({**params, path: x + h * way}, [batch])
      for h in (1e-5, -1e-5)
    ]
    slope = (sides[0] - sides[1]) / 2e-5
    assert np.vdot(gradient[path], way) == pytest.approx(slope, rel=1e-4)


def test_a_byte_is_predicted_from_those_before_it_only(text):
  batch = make_batches(text)(0)(0)
  params = numpy_model.init_params(0)
  seen = dict(batch, weights=np.zeros_like(batch["weights"]))
  seen["weights"][:, 7] = 1.0
  later = dict(seen, inputs=batch["inputs"].copy())
  later["inputs"][:, 8:] += 1
  earlier = dict(seen, inputs=batch["inputs"].copy())
  earlier["inputs"][:, 7] += 1

  assert numpy_model.loss(params, [later]) == numpy_model.loss(params, [seen])
  assert numpy_model.loss(params, [earlier]) != numpy_model.loss(params, [seen])


def test_it_learns_and_a_step_takes_its_modelled_time(text):
  slept = []
  trainer: Trainer = numpy_model.NumpyTrainer(TRAIN, 60.0, slept.append)
  batches = make_batches(text)(0)

  losses = [trainer.step(batches(i), i)["loss"] for i in range(60)]

  assert losses[0] > 5.0
  assert losses[-1] < 3.0
  assert len(slept) == 60
  assert all(0.0 < s <= 60.0 for s in slept)


def test_the_inner_state_of_one_makes_another_go_on_alike(text):
  batches = make_batches(text)(0)
  one, other = (numpy_model.NumpyTrainer(TRAIN) for _ in range(2))
  for i in range(5):
    one.step(batches(i), i)

  other.put(one.take(one.params))
  other.put_inner(one.take_inner())
  metrics = [each.step(batches(5), 5) for each in (one, other)]

  assert metrics[0] == metrics[1]
  assert other.inner_shapes().keys() == one.take_inner().keys()
  for path, x in one.params.items():
    np.testing.assert_array_equal(x, other.params[path])


def test_shards_are_disjoint_and_epochs_end(text):
  make = make_batches(text, num_epochs=2)
  seen = []
  for shard in range(3):
    batches, rows = make(shard), []
    for position in range(10**6):
      batch = batches(position)
      if batch is None:
        break
      rows += [row.tobytes() for row in batch["inputs"]]
    half = len(rows) // 2
    assert len(set(rows[:half])) == half  # None twice in an epoch.
    assert rows[:half] != rows[half:]
    seen.append(set(rows))

  assert not seen[0] & seen[1]
  assert not (seen[0] | seen[1]) & seen[2]


def test_a_shard_too_short_for_a_batch_is_refused(text):
  settings = {
    "data": {"source": text},
    "train": {**TRAIN, "batch_size": 10**6},
    "run": {"seed": 0},
  }

  with pytest.raises(ValueError, match="a batch needs 1000000"):
    numpy_training.batches_of(settings, 2)(0)
