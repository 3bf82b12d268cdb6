"""A learner's link to the syncer: background threads behind a `Port`.

One thread hears notices (and reconnects), one shows life, one pushes replies
from the copies that the loop offered, one fetches what was published. The
training loop only exchanges values with them. (arXiv 2604.21428, Sec. 3.)
"""

import dataclasses
import math
import threading
import uuid
from collections.abc import Callable, Sequence

from ddiloco_jax.learner.bulk import Bulk
from ddiloco_jax.learner.exchange import Exchange
from ddiloco_jax.learner.patience import LinkConfig, Patience, Stopped
from ddiloco_jax.learner.stream import Stream
from ddiloco_jax.protocol import events, lives
from ddiloco_jax.wire import port

_LOOK_S = 0.5  # How often a wait looks whether it was told to stop.
_LEAVE_S = 5.0  # What each thread is given to end.


class Link:
  """Implements `wire.port.Port` over a Synchronizer.

  Args:
    synchronizer: The Syncer object, or a client that mirrors it.
    learner: This learner's id.
    cfg: See LinkConfig.
    should_stop: Asked until it has joined and has every fragment.
  """

  def __init__(
    self,
    synchronizer: port.Synchronizer,
    learner: str,
    cfg: LinkConfig | None = None,
    should_stop: Callable[[], bool] = lambda: False,
  ):
    self._sync = synchronizer
    self._learner = learner
    self._cfg = cfg or LinkConfig()
    self._should_stop = should_stop
    self._shared = Exchange(uuid.uuid4().hex)
    self._patience = Patience(
      learner, self._cfg.reconnect_max_s, self._is_unwanted
    )
    self._threads: list[threading.Thread] = []

  @property
  def run(self) -> port.RunSpec:
    """The run's settings; asks the syncer the first time, and waits for it."""
    if self._shared.run is None:
      run = self._patience.call(
        self._sync.get_run, self._cfg.connect_timeout_s, "GetRun"
      )
      assert run is not None, "the link was left before it had a run"
      self._shared.run = run
    return self._shared.run

  @property
  def nonce(self) -> str:
    return self._shared.nonce

  @property
  def welcome(self) -> port.Welcomed:
    """Of the newest control stream; only once it has started."""
    assert self._shared.welcome, "the link has not joined"
    return self._shared.welcome

  def resume(
    self, nonce: str, bases: Sequence[events.Version], report: events.Reported
  ) -> None:
    shared = self._shared
    shared.resumes, shared.reported = nonce, report
    shared.reads = tuple(shard for shard, _ in report.positions)
    for p, base in enumerate(bases):
      shared.newest[p] = shared.bases[p] = base

  def start(self) -> port.Welcomed:
    """Joins and fetches every fragment; `published` then has all of them.

    A process that resumes has them, and fetches what is newer.

    Raises:
      Stopped: it was told to stop before that, or the run has finished.
      Exception: what ended the link.
    """
    run, shared, patience = self.run, self._shared, self._patience
    stream = Stream(self._sync, self._learner, self._cfg, shared, patience)
    bulk = Bulk(self._sync, self._learner, run, shared, patience)
    for target in (stream.hear, stream.beat, bulk.push, bulk.fetch):
      thread = threading.Thread(
        target=self._guard, args=(target,), name=target.__name__, daemon=True
      )
      self._threads.append(thread)
      thread.start()
    with shared.changed:
      while not shared.has_all(run.layout.num_fragments):
        shared.changed.wait(_LOOK_S)
        self._raise()
        self._check_stop()
        if shared.finished:
          raise Stopped(
            f"learner {self._learner} had not fetched every fragment when the"
            f" run finished: {shared.finished.reason}"
          )
      return self.welcome

  def reading(self) -> port.Reading | None:
    shared = self._shared
    with shared.changed:
      reading, shared.reading = shared.reading, None
      if reading is not None:
        shared.reads = tuple(shard for shard, _ in reading.positions)
    return reading

  def published(self) -> Sequence[port.Publication]:
    shared = self._shared
    with shared.changed:
      self._raise()
      ready, shared.ready = shared.ready, {}
    return [ready[p] for p in sorted(ready)]

  def adopted(
    self, publication: port.Publication, step: int, counts: events.Counts
  ) -> None:
    shared, p = self._shared, publication.fragment
    with shared.changed:
      applied = events.Applied(
        fragment=p,
        version=publication.version,
        step=step,
        counts=events.ZERO if shared.is_anew() else counts,
        exact=publication.exact,
      )
      shared.note_adoption(applied)
      shared.copies.pop(p, None)
      shared.earlier.pop(p, None)
      if shared.reported:
        shared.reported = _without(shared.reported, p)
      shared.say(applied)

  def due_next(self, step_s: float) -> Sequence[int]:
    run = self.run
    num = run.layout.num_fragments
    with self._shared.changed:
      start = self._shared.last_slot + 1
      slot_s = self._shared.stamp.step_s * run.cycle_steps / num
      pulled = list(self._shared.pulls)
    ahead = math.ceil(step_s / slot_s) if slot_s > 0 and step_s > 0 else 1
    due = [(start + i) % num for i in range(min(num, 1 + ahead))]
    return list(dict.fromkeys(pulled + due))

  def offer(self, copies: dict[int, port.Copy]) -> None:
    """Takes this boundary's copies; see the Port.

    Until the device has made one, that of the boundary before answers.
    """
    shared = self._shared
    with shared.changed:
      if shared.is_anew():
        return
      shared.earlier, shared.copies = shared.copies, copies
      shared.changed.notify_all()

  def report(self, report: events.Reported) -> None:
    with self._shared.changed:
      if self._shared.is_anew():
        return
      self._shared.reported = report
      self._shared.say(report)

  def recovered(self, recovered: events.Recovered) -> None:
    with self._shared.changed:
      self._shared.recovered = recovered
      self._shared.say(recovered)

  def stamp(self) -> port.Stamp:
    return self._shared.stamp

  def marker(self) -> port.MarkerNotice | None:
    return self._shared.marker

  def marked(self, done: events.MarkerDone) -> None:
    shared = self._shared
    with shared.changed:
      if shared.marker and shared.marker.snapshot == done.snapshot:
        shared.marker = None
      shared.say(done)

  def ending(self) -> str | None:
    shared = self._shared
    self._raise()
    if shared.finished:
      return shared.finished.reason
    return shared.ending

  def finished(self) -> port.FinishedNotice | None:
    return self._shared.finished

  def start_over(self, reason: str) -> None:
    shared = self._shared
    with shared.changed:
      shared.say(events.Left(reason=reason))
      shared.nonce, shared.resumes = lives.next_life(shared.nonce), ""
      shared.fences, shared.recovered = True, None
      control = shared.control
    if control:
      control.close()

  def wait(self, timeout_s: float) -> bool:
    with self._shared.changed:
      self._raise()
      return self._shared.wait_for_news(timeout_s)

  def leave(self, reason: str) -> None:
    """Says goodbye, unless the run has finished, and ends the threads."""
    shared = self._shared
    with shared.changed:
      if not (shared.finished or shared.error):
        shared.say(events.Left(reason=reason))
      shared.left = True
      shared.changed.notify_all()
    if shared.control:
      shared.control.close()
    for thread in self._threads:
      thread.join(timeout=_LEAVE_S)

  def _guard(self, target: Callable[[], None]) -> None:
    shared = self._shared
    try:
      target()
    except BaseException as error:
      with shared.changed:
        shared.error = shared.error or error
        shared.tell_loop()

  def _raise(self) -> None:
    if self._shared.error:
      raise self._shared.error

  def _check_stop(self) -> None:
    if self._should_stop():
      raise Stopped(f"learner {self._learner} was told to stop")

  def _is_unwanted(self) -> bool:
    if self._shared.welcome is None:
      self._check_stop()
    return self._shared.left


def _without(report: events.Reported, fragment: int) -> events.Reported:
  """A report once a fragment's counts have started again."""
  counts = list(report.counts)
  counts[fragment] = events.Counts()
  return dataclasses.replace(
    report,
    counts=tuple(counts),
    boundaries=tuple(b for b in report.boundaries if b[0] != fragment),
  )
