"""A trainer without JAX: gradient steps on |theta - target|^2 / 2 in numpy."""

import threading

import numpy as np


class Quadratic:
  """Implements what the learner's loop asks of a trainer.

  Args:
    shapes: Path -> shape; parameters start at zero, as Theta 0 in these tests.
    target: What this learner's data asks every parameter to be.
    lr: Of the plain gradient step.
    pause: Called in every step; a test makes a learner slow with it.
  """

  def __init__(self, shapes, target, lr=0.1, pause=lambda: None):
    self.params = {p: np.zeros(s, np.float32) for p, s in shapes.items()}
    self.target = np.float32(target)
    self.lr = lr
    self.pause = pause
    self.indices = []

  def step(self, batch, index):
    self.pause()
    self.indices.append(index)
    self.params = {
      path: x - np.float32(self.lr) * (x - self.target)
      for path, x in self.params.items()
    }
    loss = np.mean(
      [np.mean((x - self.target) ** 2) for x in self.params.values()]
    )
    return {"loss": float(loss)}

  def learning_rate(self, index):
    return self.lr

  def take(self, paths):
    return {path: self.params[path].copy() for path in paths}

  def put(self, arrays):
    self.params |= {path: np.array(x) for path, x in arrays.items()}

  def inner_shapes(self):
    return {}

  def take_inner(self):
    return {}

  def put_inner(self, arrays):
    assert not arrays


class Gate:
  """A pause that holds trainers in a step while it is shut.

  Args:
    pause_s: What it takes while it is open.
  """

  def __init__(self, pause_s=0.0):
    self._pause_s = pause_s
    self._changed = threading.Condition()
    self._is_open, self._num_held = True, 0

  def __call__(self):
    threading.Event().wait(self._pause_s)
    with self._changed:
      self._num_held += 1
      self._changed.notify_all()
      self._changed.wait_for(lambda: self._is_open, 200.0)
      self._num_held -= 1

  def shut(self, num=1):
    """Returns once so many trainers stand in a step, and stay there.

    Until then one may be between two steps, and do there what it likes.
    """
    with self._changed:
      self._is_open = False
      held = self._changed.wait_for(lambda: self._num_held >= num, 60.0)
      assert held, f"{self._num_held} of {num} are in a step after 60 s"

  def open(self):
    with self._changed:
      self._is_open = True
      self._changed.notify_all()


class Momentum(Quadratic):
  """With an inner state: a running mean of the gradients, and its age."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.mean = {p: np.zeros_like(x) for p, x in self.params.items()}
    self.age = np.zeros((), np.int32)
    self.given = []
    self.got = []

  def step(self, batch, index):
    for path, x in self.params.items():
      self.mean[path] = np.float32(0.9) * self.mean[path] + (x - self.target)
    self.age = self.age + np.int32(1)
    return super().step(batch, index)

  def _inner(self):
    return {f"inner/{p}": x for p, x in self.mean.items()} | {
      "inner/age": np.asarray(self.age)
    }

  def inner_shapes(self):
    return {p: (x.shape, x.dtype.name) for p, x in self._inner().items()}

  def take_inner(self):
    self.given.append({p: x.copy() for p, x in self._inner().items()})
    return self.given[-1]

  def put_inner(self, arrays):
    self.got.append({p: np.array(x) for p, x in arrays.items()})
    self.mean = {p: self.got[-1][f"inner/{p}"] for p in self.mean}
    self.age = self.got[-1]["inner/age"]


def constant_batches(tokens):
  """Batches of so many loss tokens, for every shard and position."""
  return lambda shard: lambda position: {"weights": np.ones(tokens, np.float32)}
