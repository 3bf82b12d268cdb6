"""A learner's training loop: an ordinary loop, and a Port at its step boundaries.

Only this loop touches the train state. What it owns per fragment is an anchor:
the base that it trains from, and the steps and tokens since. (arXiv 2604.21428,
Sec. 3 and App. E.)
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ddiloco_jax.algorithm import delta as deltas
from ddiloco_jax.algorithm.fragments import slot
from ddiloco_jax.learner import part as parts
from ddiloco_jax.learner.anchor import Anchor, ScheduleIndex
from ddiloco_jax.learner.recovery import Recovery
from ddiloco_jax.learner.seams import Batches, Trainer
from ddiloco_jax.learner.shards import Shards
from ddiloco_jax.learner.spikes import Spikes
from ddiloco_jax.protocol import events
from ddiloco_jax.wire import port as ports

_log = logging.getLogger(__name__)
SaveCut = Callable[[parts.Part, Callable[[str | None], None]], None]
_WAIT_S = 1.0  # Longest sleep between two looks at an ended or blocked run.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
  """How a learner trains between publications.

  Attributes:
    lr_index: Indexes the inner learning rate by the "syncer" step as this
      learner knows it, or by its "own" step.
    max_steps: Own steps after which the data counts as used up; 0: no bound.
    loss_spike_factor: Of the median loss: beyond it a learner starts over from
      the global state; 0: never.
  """

  lr_index: str = "syncer"
  max_steps: int = 0
  loss_spike_factor: float = 0.0

  def __post_init__(self):
    if self.lr_index not in ("syncer", "own"):
      raise ValueError(
        f"learner.lr_index is {self.lr_index!r}; it must be 'syncer' or 'own'."
      )


class Learner:
  """Runs the loop against one Port.

  Args:
    port: Not started yet.
    trainer: Owns the train state.
    make_batches: Shard -> Batches.
    cfg: See LearnerConfig.
    at_boundary: Called after each step with the steps taken, its metrics and
      this learner's progress, for its records and checkpoints.
    recovery: Of the inner state, from peers and for peers; None for neither.
    note: Called with every change of the train state as JSON values: what was
      adopted, and what a step was taken with.
    save_cut: Given this learner's part of a cut, the train state apart, and
      whom to tell (None, or why it failed) once both are on disk. None: this
      learner keeps no such parts.
    part: Goes on from there; the trainer has its train state already.
  """

  def __init__(
    self,
    port: ports.Port,
    trainer: Trainer,
    make_batches: Callable[[int], Batches],
    cfg: LearnerConfig,
    at_boundary: Callable[..., None] = lambda step, metrics, progress: None,
    recovery: Recovery | None = None,
    note: Callable[[dict[str, Any]], None] = lambda line: None,
    save_cut: SaveCut | None = None,
    part: parts.Part | None = None,
  ):
    self._port = port
    self._trainer = trainer
    self._shards = Shards(make_batches)
    self._cfg = cfg
    self._at_boundary = at_boundary
    self._recovery = recovery
    self._note = note
    self._save_cut = save_cut
    self._part = part
    self._first = 0  # The step that it began from.
    # Of the cut whose part is written, or was; another has its own marker.
    self._saving: ports.MarkerNotice | None = None
    self._paths = [
      [leaf.path for leaf in port.run.layout.fragment(p)]
      for p in range(port.run.layout.num_fragments)
    ]
    self._anchors: dict[int, Anchor] = {}
    self._boundaries: dict[int, int] = {}
    self._copies: dict[int, ports.Copy] = {}
    self._held: dict[int, ports.Publication] = {}
    self._index = ScheduleIndex(port.run.cycle_steps)
    self._metrics: Mapping[str, float] = {}
    self._spikes = Spikes(cfg.loss_spike_factor)
    self._exhausted = False
    self._waiting = False
    self._changed = False  # What it reads, since its last report.
    self._should_stop: Callable[[], bool] = lambda: False

  def train(self, should_stop: Callable[[], bool] = lambda: False) -> str:
    """Trains until the run ends.

    Args:
      should_stop: Asked at every boundary; a preemption notice, for example.

    Returns:
      Why it ended.

    Raises:
      Exception: what ended the link, or the trainer's own.
    """
    self._should_stop = should_stop
    port = self._port
    if self._part:
      part = self._part
      port.resume(part.record.nonce, part.versions, part.report())
    welcome = port.start()
    if self._recovery:
      self._recovery.recover(port, self._trainer, should_stop)
    step = self._resume(self._part) if self._part else self._begin(welcome)
    step_s, before = 0.0, time.monotonic()
    while True:
      self._adopt_published(step)
      self._await_publication(step)
      self._await_stamp(step)
      if port.ending() or should_stop():
        if reason := self._end(step):
          return reason
        before = time.monotonic()
        continue
      batch = self._next_batch(step - self._first)
      self._exhausted = batch is None
      if batch is None:
        self._report(step)
        self._idle(step)
        continue
      metrics = self._train_step(batch, step)
      self._shards.advance()
      step += 1
      now = time.monotonic()
      # Peaks count: a copy too many costs less than a pull that has none.
      step_s, before = max(now - before, 0.8 * step_s), now
      spike = self._spikes.look(metrics.get("loss"))
      if spike is None:
        self._offer(step, self._due(step, step_s))
      self._report(step)
      if spike is not None and not port.ending():
        self._roll_back(spike)
      self._at_boundary(step, metrics, self._progress())

  def _begin(self, welcome: ports.Welcomed) -> int:
    """The step to begin from: where t follows own steps, it is t."""
    run = self._port.run
    self._shards.begin(welcome.positions)
    if run.wait_for_publication or run.max_ahead > 0:
      self._first = self._port.stamp().t
    return self._first

  def _resume(self, part: parts.Part) -> int:
    """Everything as it was at the part's boundary; its step."""
    self._first = part.record.first
    self._anchors = {p: part.anchor(p) for p in range(len(self._paths))}
    self._index.restore(part.record.index)
    self._shards.restore(part.record.reads)
    waiting = part.waiting()
    self._boundaries = {p: at for p, (at, _) in waiting.items()}
    self._copies = {p: copy for p, (_, copy) in waiting.items()}
    waits = self._port.run.wait_for_publication
    due = () if waits else self._port.due_next(0.0)
    self._offer(part.record.step, due)
    return part.record.step

  # --- parts of a step ----------------------------------------------------------

  def _adopt_published(self, step: int) -> None:
    reading = self._port.reading()
    if reading is not None and reading.anew:
      self._shards.begin(reading.positions)
      self._start_over("another process had this one's place")
      if self._exhausted:
        self._report(step)
    elif reading is not None:
      self._shards.change(reading.positions)
      self._changed = True
    self._held |= {p.fragment: p for p in self._port.published()}
    self._mark(step)  # What was published after a marker is no part of its cut.
    for p in [p for p in self._held if self._may_adopt(p, step)]:
      self._adopt(self._held.pop(p), step)
    self._mark(step)
    if self._changed:  # Whoever waits for a shard does so until it is told.
      self._changed = False
      self._report(step)
    if self._recovery:
      clock = [self._anchors[p].version for p in range(len(self._paths))]
      self._recovery.give(step, clock, self._trainer)

  def _start_over(self, reason: str) -> None:
    """Drops the steps since the last adoptions: their process is over."""
    for p, anchor in self._anchors.items():
      self._trainer.put(anchor.base)
      self._anchors[p] = Anchor(anchor.base, anchor.version)
    self._copies, self._boundaries = {}, {}
    self._note({"start_over": reason})

  def _roll_back(self, reason: str) -> None:
    """Starts over as another process would, and not with the same data.

    Its own inner state is no better than its parameters: a peer's, or zeros.
    """
    _log.warning("starts over from the global state: %s", reason)
    port = self._port
    port.start_over(reason)
    while not ((reading := port.reading()) and reading.anew):
      if port.ending() or self._should_stop():
        return
      port.wait(_WAIT_S)
    self._shards.change(reading.positions)
    shapes = self._trainer.inner_shapes()
    self._trainer.put_inner(
      {path: np.zeros(shape, dtype) for path, (shape, dtype) in shapes.items()}
    )
    if self._recovery:
      self._recovery.own = "fresh"
      self._recovery.recover(port, self._trainer, self._should_stop)
    self._start_over(reason)

  def _mark(self, step: int) -> None:
    """Saves this learner's part of a cut, once it holds exactly its clock.

    A version that a restart has rolled back is none of the clock, whatever its
    number: the newest one replaces it.
    """
    marker = self._port.marker()
    if marker is None or marker is self._saving:
      return
    if len(self._anchors) < len(marker.clock):
      return  # It has not begun to train.
    missed = [
      (held, wanted)
      for p, wanted in enumerate(marker.clock)
      if (held := self._anchors[p].version) != wanted
    ]
    epoch = self._port.welcome.epoch
    if any(h.n <= wanted.n or h.epoch < epoch for h, wanted in missed):
      return
    self._saving = marker

    def tell(failure: str | None) -> None:
      self._port.marked(
        events.MarkerDone(
          snapshot=marker.snapshot,
          saved=failure is None,
          reason=failure or "",
        )
      )

    if self._save_cut is None:
      tell("it keeps no checkpoints")
    elif missed:
      tell("it trains from newer versions than the cut's")
    else:
      self._save_cut(self._keep(marker.snapshot, step), tell)

  def _keep(self, snapshot: int, step: int) -> parts.Part:
    record = parts.Record(
      run_id=self._port.run.run_id,
      snapshot=snapshot,
      nonce=self._port.nonce,
      step=step,
      first=self._first,
      reads=self._shards.save(),
      index=self._index.save(),
    )
    return parts.keep(record, self._anchors, self._boundaries, self._copies)

  def _may_adopt(self, p: int, step: int) -> bool:
    """A copy that was made for a boundary fixes when it is replaced."""
    delay = self._port.run.adoption_delay_steps
    at = self._boundaries.get(p)
    return at is None or step - at >= delay or self._held[p].exact

  def _adopt(self, publication: ports.Publication, step: int) -> None:
    p, fresh = publication.fragment, publication.arrays
    anchor = self._anchors.get(p)
    is_whole = publication.exact or anchor is None
    alpha = 0.0 if is_whole else self._port.run.alpha
    put_blend(self._trainer, fresh, alpha)
    self._note(
      {
        "adopt": p,
        "version": list(publication.version),
        "exact": publication.exact,
        "alpha": alpha,
      }
    )
    self._anchors[p] = Anchor(fresh, publication.version)
    self._copies.pop(p, None)
    self._boundaries.pop(p, None)
    counts = anchor.counts if anchor else events.Counts()
    self._port.adopted(publication, step, counts)

  def _train_step(
    self, batch: Mapping[str, np.ndarray], step: int
  ) -> Mapping[str, float]:
    follows = self._cfg.lr_index == "syncer"
    index = self._index.next(self._port.stamp().t) if follows else step
    lr = self._trainer.learning_rate(index)
    place = self._shards.place()
    self._metrics = metrics = self._trainer.step(batch, index)
    self._note(
      {"step": step + 1, "index": index, "place": list(place), **metrics}
    )
    tokens = int(np.count_nonzero(batch["weights"]))
    for anchor in self._anchors.values():
      anchor.add(tokens, lr)
    return metrics

  def _next_batch(self, num_steps: int) -> Mapping[str, np.ndarray] | None:
    if 0 < self._cfg.max_steps <= num_steps:
      return None
    return self._shards.batch()

  def _due(self, step: int, step_s: float) -> Iterable[int]:
    run = self._port.run
    if not run.wait_for_publication:
      return self._port.due_next(step_s)
    num = run.layout.num_fragments
    due = [
      p
      for p in range(num)
      if step % run.cycle_steps == slot(p, num, run.cycle_steps)
      and p not in self._boundaries
    ]
    self._boundaries.update({p: step for p in due})
    return due

  def _offer(self, step: int, due: Iterable[int]) -> None:
    """Copies fragments at this boundary; older copies are replaced."""
    copies = {p: self._copy(p) for p in due if self._has_steps(p)}
    if self._port.run.wait_for_publication:
      kept = {p: c for p, c in self._copies.items() if p in self._boundaries}
      copies = kept | copies
      self._boundaries = {
        p: at for p, at in self._boundaries.items() if p in copies
      }
    self._copies = copies
    self._port.offer(dict(copies))

  def _has_steps(self, p: int) -> bool:
    return self._anchors[p].counts.steps > 0

  def _copy(self, p: int) -> ports.Copy:
    anchor = self._anchors[p]
    return ports.Copy(
      arrays=self._trainer.take(self._paths[p]),
      base=anchor.base,
      base_version=anchor.version,
      counts=anchor.counts,
      lr_sum=anchor.lr_sum,
      positions=self._shards.covered(),
    )

  def _report(self, step: int) -> None:
    self._port.report(
      events.Reported(
        step=step,
        counts=tuple(self._anchors[p].counts for p in range(len(self._paths))),
        positions=self._shards.positions(),
        returned=self._shards.returned(),
        boundaries=tuple(sorted(self._boundaries.items())),
        waiting=self._waiting,
        exhausted=self._exhausted,
        metrics=tuple(sorted(self._metrics.items())),
      )
    )

  def _progress(self) -> dict[str, Any]:
    return {
      "positions": [list(p) for p in self._shards.positions()],
      "versions": [list(self._anchors[p].version) for p in self._anchors],
      "counts": [list(self._anchors[p].counts) for p in self._anchors],
    }

  # --- where a learner waits, if it was told to ---------------------------------

  def _await_publication(self, step: int) -> None:
    """Blocks while a copy that is old enough has not been published.

    Where t follows the learners' own steps, the last one is known too.
    """

    def is_due() -> bool:
      run = self._port.run  # Another one, once a restart has moved the end.
      is_last = run.wait_for_publication and 0 < run.num_syncer_steps <= step
      delay = run.adoption_delay_steps
      return is_last or any(
        step - at >= delay for at in self._boundaries.values()
      )

    self._block(is_due, step)

  def _await_stamp(self, step: int) -> None:
    """Blocks while this learner is more than `max_ahead` steps ahead of t."""
    bound = self._port.run.max_ahead

    def is_ahead() -> bool:
      return 0 < bound < step - self._port.stamp().t

    self._block(is_ahead, step)

  def _block(self, condition: Callable[[], bool], step: int) -> None:
    if not condition():
      return
    self._waiting = True
    self._report(step)
    while condition() and not (self._port.ending() or self._should_stop()):
      self._port.wait(_WAIT_S)
      self._adopt_published(step)
    self._waiting = False

  # --- the end -------------------------------------------------------------------

  def _idle(self, step: int) -> None:
    """Data is used up: stay, answer pulls, adopt, until there is more."""
    while not (self._port.ending() or self._should_stop()):
      self._port.wait(_WAIT_S)
      self._adopt_published(step)
      if self._next_batch(step - self._first) is not None:
        return

  def _end(self, step: int) -> str | None:
    """Answers the flush rounds and adopts the exact result.

    Returns:
      Why it ended; None if a syncer that was restored from before the end has
      withdrawn it.
    """
    port = self._port
    self._offer(step, range(len(self._paths)))
    while not (port.finished() or self._should_stop()):
      if not port.ending():
        return None
      port.wait(_WAIT_S)
      self._adopt_published(step)
    finished = port.finished()
    reason = finished.reason if finished else "this learner was told to stop"
    self._report(step)
    self._adopt_published(step)
    port.leave(reason)
    return reason


def put_blend(
  trainer: Trainer, fresh: Mapping[str, np.ndarray], alpha: float
) -> None:
  """Puts a publication into a model, which keeps `alpha` of its own."""
  if alpha:
    fresh = deltas.adopt(trainer.take(list(fresh)), fresh, alpha)
  trainer.put(fresh)
