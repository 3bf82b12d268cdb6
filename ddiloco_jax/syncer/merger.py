"""The tensors of a run and the worker that changes them.

One thread owns Theta and the outer state of every fragment: it merges, takes
the outer step, encodes what is published, and hands out snapshots between two
merges. Arrays are replaced, never written, so a reference is a copy. (arXiv
2604.21428, Sec. 3.3.)
"""

import collections
import concurrent.futures
import dataclasses
import queue
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optax

from ddiloco_jax.algorithm import merge, outer, robust
from ddiloco_jax.algorithm.digest import digest
from ddiloco_jax.algorithm.fragments import Layout
from ddiloco_jax.protocol import events
from ddiloco_jax.syncer.inbox import Reply
from ddiloco_jax.wire import codec

NUM_KEPT = 2  # Published versions that can be fetched (wire: FetchFragment).
Record = Callable[[events.Merge, Sequence[Reply]], object]
Commit = Callable[[events.Merged, Mapping[str, np.ndarray], Any], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
  """One version of a fragment, as it is served."""

  version: events.Version
  theta: dict[str, np.ndarray]
  format: str
  data: bytearray
  crc32: int


@dataclasses.dataclass(frozen=True, slots=True)
class Tensors:
  """Theta and the outer state of each fragment, by fragment index."""

  theta: tuple[dict[str, np.ndarray], ...]
  outer: tuple[Any, ...]


class Merger:
  """Owns the tensors; runs `Merge` effects one after the other.

  Args:
    layout: Of the model.
    tensors: What to start from; float32.
    versions: Version of each fragment of `tensors`.
    tx: The outer optimizer.
    cfg: How deltas are merged.
    down_format: Of ordinary publications.
    done: Called with a `Merged` event after each merge, on the worker.
    failed: Called with what ended the worker, on the worker.
    record: Called with each merge before it is done, on the worker; then the
      replies must hold the bytes that were received.
    commit: Called with each merge before it can be fetched and before `done`,
      on the worker, with the new Theta and outer state of its fragment.
  """

  def __init__(
    self,
    layout: Layout,
    tensors: Tensors,
    versions: tuple[events.Version, ...],
    tx: optax.GradientTransformation,
    cfg: merge.MergeConfig,
    down_format: str,
    done: Callable[[events.Merged], object],
    failed: Callable[[BaseException], None],
    record: Record | None = None,
    commit: Commit | None = None,
  ):
    self._layout = layout
    self._tx = tx
    self._cfg = cfg
    self._format = down_format
    self._done = done
    self._failed = failed
    self._record = record
    self._commit = commit
    self._outer = list(tensors.outer)
    self._kept: list[collections.deque[Published]] = [
      collections.deque([self._encode(p, version, theta)], maxlen=NUM_KEPT)
      for p, (version, theta) in enumerate(zip(versions, tensors.theta))
    ]
    self._work: queue.SimpleQueue = queue.SimpleQueue()
    self._thread = threading.Thread(
      target=self._run, name="merge-worker", daemon=True
    )
    self._thread.start()

  @property
  def records(self) -> bool:
    """Whether replies must hold the bytes that were received."""
    return self._record is not None

  def merge(self, effect: events.Merge, replies: list[Reply]) -> None:
    """Queues a merge; the replies belong to the worker from now on."""
    self._work.put((effect, replies))

  def snapshot(self, save: Callable[[], Any]) -> tuple[Tensors, Any]:
    """The tensors between two merges, and what `save` returns there."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    self._work.put((future, save))
    return future.result()

  def get(self, fragment: int, n: int, exact: bool) -> Published | None:
    """A kept version of a fragment; n == 0 is the newest.

    An exact one is float32 whatever the down format. None if not kept.
    """
    for kept in reversed(self._kept[fragment].copy()):
      if n in (0, kept.version.n):
        if exact and kept.format != "float32":
          return self._encode(fragment, kept.version, kept.theta, "float32")
        return kept
    return None

  def close(self) -> None:
    """Finishes what is queued and ends the worker."""
    self._work.put(None)
    self._thread.join()

  def _run(self) -> None:
    try:
      cold = list(range(len(self._outer)))
      while (job := self._next_job(cold)) is not None:
        target, payload = job
        if isinstance(target, events.Merge):
          self._done(self._merge(target, payload))
        else:
          target.set_result((self._tensors(), payload()))
    except BaseException as error:
      self._failed(error)
      while (job := self._work.get()) is not None:
        if isinstance(job[0], concurrent.futures.Future):
          job[0].set_exception(error)

  def _next_job(self, cold: list[int]) -> Any:
    """Waits for work; until there is some, compiles the outer steps to come.

    A compilation within a merge would count as the time that learners take to
    adopt, and close the grace window of the rounds that follow.
    """
    while cold and self._work.empty():
      p = cold.pop(0)
      theta = self._kept[p][-1].theta
      zeros = {path: np.zeros_like(array) for path, array in theta.items()}
      outer.step(self._tx, theta, zeros, self._outer[p])
    return self._work.get()

  def _merge(self, effect: events.Merge, replies: list[Reply]) -> events.Merged:
    p = effect.fragment
    if self._record is not None:
      self._record(effect, replies)
    deltas = [reply.delta for reply in replies]
    replies.clear()
    merged = merge_deltas(self._layout, self._cfg, effect, deltas)
    theta, state = outer.step(
      self._tx, self._kept[p][-1].theta, merged, self._outer[p]
    )
    published = self._encode(p, effect.version, theta)
    done = events.Merged(
      fragment=p,
      round=effect.round,
      version=effect.version,
      digest=digest(theta),
    )
    if self._commit is not None:
      self._commit(done, theta, state)
    self._outer[p] = state
    self._kept[p].append(published)
    return done

  def _tensors(self) -> Tensors:
    return Tensors(
      tuple(kept[-1].theta for kept in self._kept), tuple(self._outer)
    )

  def _encode(
    self,
    fragment: int,
    version: events.Version,
    theta: Mapping[str, np.ndarray],
    fmt: str = "",
  ) -> Published:
    fmt = fmt or self._format
    data = codec.encode(theta, self._layout.fragment(fragment), fmt)
    return Published(version, dict(theta), fmt, data, zlib.crc32(data))


def merge_deltas(
  layout: Layout,
  cfg: merge.MergeConfig,
  effect: events.Merge,
  deltas: list[dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
  """The merged delta of a round, for whoever merges, first or again.

  Args:
    deltas: In the order of `effect.inputs`; emptied as they are added.
  """
  accumulator = robust.make_accumulator(layout.fragment(effect.fragment), cfg)
  for item in effect.inputs:
    accumulator.add(deltas.pop(0), item.weight)
  return accumulator.result()
