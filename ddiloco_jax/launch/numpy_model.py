"""A byte model of plain numpy that starts in a second, and its trainer.

For fleets that JAX processes would not fit (`cli.storm --numpy_learners`): the
next byte from the CONTEXT bytes before it, by an embedding, a hidden layer and
a softmax (Bengio et al., 2003), 41,000 parameters in twelve tensors. The
gradient is written by hand, the optimizer is AdamW as in `training/`.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

Params = dict[str, np.ndarray]
Batch = Mapping[str, np.ndarray]

VOCAB, CONTEXT, EMBED, HIDDEN = 256, 8, 16, 96
_EMBED, _BIAS = "embed/embedding", "hidden/bias"
_HEAD, _HEAD_BIAS = "head/kernel", "head/bias"
_KERNELS = tuple(f"hidden/kernel_{i}" for i in range(CONTEXT))


def init_params(seed: int) -> Params:
  """Theta 0, float32 by tree path, for the syncer's --layout_arrays."""
  draws = np.random.default_rng(seed)

  def normal(*shape: int, std: float) -> np.ndarray:
    return (std * draws.standard_normal(shape)).astype(np.float32)

  params = {_EMBED: normal(VOCAB, EMBED, std=0.1)}
  for path in _KERNELS:
    params[path] = normal(EMBED, HIDDEN, std=(CONTEXT * EMBED) ** -0.5)
  params[_BIAS] = np.zeros(HIDDEN, np.float32)
  params[_HEAD] = normal(HIDDEN, VOCAB, std=0.5 * HIDDEN**-0.5)
  params[_HEAD_BIAS] = np.zeros(VOCAB, np.float32)
  return params


def loss(params: Params, batches: Iterable[Batch]) -> float:
  """Nats per token over batches of inputs, targets and weights [B, T]."""
  nats = weight = 0.0
  for batch in batches:
    log_p, *_ = _forward(params, batch["inputs"])
    told = np.take_along_axis(log_p, batch["targets"].reshape(-1, 1), 1)[:, 0]
    weights = batch["weights"].reshape(-1)
    nats -= float(weights @ told)
    weight += float(weights.sum())
  return nats / weight


def loss_and_gradient(params: Params, batch: Batch) -> tuple[float, Params]:
  """The mean loss of a batch in nats, and its gradient by tree path."""
  log_p, contexts, flat, hidden, kernel = _forward(params, batch["inputs"])
  targets, weights = batch["targets"].reshape(-1), batch["weights"].reshape(-1)
  share = weights / max(1.0, float(weights.sum()))
  rows = np.arange(len(targets))
  value = -float(share @ log_p[rows, targets])
  d_logits = np.exp(log_p)
  d_logits[rows, targets] -= 1
  d_logits *= share[:, None]
  d_pre = (d_logits @ params[_HEAD].T) * (1 - hidden**2)
  d_embed = np.zeros_like(params[_EMBED])
  np.add.at(d_embed, contexts, (d_pre @ kernel.T).reshape(*contexts.shape, -1))
  d_kernels = np.split(flat.T @ d_pre, CONTEXT)
  return value, {
    _EMBED: d_embed,
    **dict(zip(_KERNELS, d_kernels, strict=True)),
    _BIAS: d_pre.sum(0),
    _HEAD: hidden.T @ d_logits,
    _HEAD_BIAS: d_logits.sum(0),
  }


def _forward(params: Params, inputs: np.ndarray) -> tuple[np.ndarray, ...]:
  """Log-probabilities [B T, V], and what the gradient needs of the way."""
  # Before a window's first byte lie separators, which are zeros.
  padded = np.pad(inputs, ((0, 0), (CONTEXT - 1, 0)))
  contexts = np.lib.stride_tricks.sliding_window_view(padded, CONTEXT, 1)
  contexts = contexts.reshape(-1, CONTEXT)
  flat = params[_EMBED][contexts].reshape(len(contexts), -1)
  kernel = np.concatenate([params[path] for path in _KERNELS])
  hidden = np.tanh(flat @ kernel + params[_BIAS])
  logits = hidden @ params[_HEAD] + params[_HEAD_BIAS]
  logits -= logits.max(-1, keepdims=True)
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  return log_p, contexts, flat, hidden, kernel


class NumpyTrainer:
  """Implements `learner.seams.Trainer`.

  Args:
    settings: The `train` section of a run's settings; it warms up linearly,
      and then the rate stays.
    step_s: A step takes at least so long, as one of a larger model would.
    sleep: Takes seconds.
  """

  def __init__(
    self,
    settings: Mapping[str, Any],
    step_s: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
  ):
    self.params = init_params(0)  # Theta comes from the syncer.
    self._settings = settings
    self._step_s = step_s
    self._sleep = sleep
    self._age = 0
    self._m = {path: np.zeros_like(x) for path, x in self.params.items()}
    self._v = {path: np.zeros_like(x) for path, x in self.params.items()}

  def step(self, batch: Batch, index: int) -> Mapping[str, float]:
    began = time.monotonic()
    rate = self.learning_rate(index)
    value, gradient = loss_and_gradient(self.params, batch)
    norm = self._update(gradient, rate)
    self._sleep(max(0.0, began + self._step_s - time.monotonic()))
    return {"loss": value, "grad_norm": norm, "learning_rate": rate}

  def learning_rate(self, index: int) -> float:
    """Fresh moments warm up again, as in `training/optimizer.py`."""
    s = self._settings
    share = min(1.0, (index + 1) / max(1, s["warmup_steps"]))
    if rewarm := min(s["rewarm_steps"], s["warmup_steps"]):
      share = min(share, (self._age + 1) / rewarm)
    return s["learning_rate"] * share

  def take(self, paths: Iterable[str]) -> Params:
    return {path: self.params[path].copy() for path in paths}

  def put(self, arrays: Mapping[str, np.ndarray]) -> None:
    self.params |= {p: np.array(x, np.float32) for p, x in arrays.items()}

  def inner_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
    return {p: (x.shape, x.dtype.name) for p, x in self.take_inner().items()}

  def take_inner(self) -> Params:
    moments = {f"inner/m/{path}": x.copy() for path, x in self._m.items()}
    moments |= {f"inner/v/{path}": x.copy() for path, x in self._v.items()}
    return moments | {"inner/moments_age": np.array(self._age, np.int32)}

  def put_inner(self, arrays: Mapping[str, np.ndarray]) -> None:
    self._age = int(arrays["inner/moments_age"])
    for path in self.params:
      self._m[path] = np.array(arrays[f"inner/m/{path}"])
      self._v[path] = np.array(arrays[f"inner/v/{path}"])

  def _update(self, gradient: Params, rate: float) -> float:
    """One step of AdamW; returns the gradient's norm before it was clipped."""
    s = self._settings
    norm = float(np.sqrt(sum(np.vdot(g, g) for g in gradient.values())))
    clip = s["clip_norm"]
    scale = np.float32(clip / norm if 0 < clip < norm else 1.0)
    self._age += 1
    b1, b2 = (np.float32(s[name]) for name in ("b1", "b2"))
    fix1, fix2 = 1 - s["b1"] ** self._age, 1 - s["b2"] ** self._age
    for path, g in gradient.items():
      g = scale * g
      m = self._m[path] = b1 * self._m[path] + (1 - b1) * g
      v = self._v[path] = b2 * self._v[path] + (1 - b2) * g * g
      root = np.sqrt(v / np.float32(fix2)) + np.float32(s["eps"])
      direction = m / np.float32(fix1) / root
      direction += np.float32(s["weight_decay"]) * self.params[path]
      self.params[path] = self.params[path] - np.float32(rate) * direction
    return norm
