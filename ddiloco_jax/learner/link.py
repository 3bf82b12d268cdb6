"""A learner's link to the syncer: background threads behind a `Port`.

Three threads do all that waits: one reads notices (and reconnects), one pushes
replies from the copies that the loop offered, one fetches what was published.
The training loop only exchanges values with them. (arXiv 2604.21428, Sec. 3.)
"""

import dataclasses
import logging
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from ddiloco_jax.algorithm import delta as deltas
from ddiloco_jax.protocol import events
from ddiloco_jax.wire import codec, port
from ddiloco_jax.wire.status import ServiceError

T = TypeVar("T")
_LOOK_S = 0.5  # How often a wait looks whether it was told to stop.
_log = logging.getLogger(__name__)


class SyncerLost(Exception):
  """No syncer was reachable for longer than the learner may go on alone."""


class Stopped(Exception):
  """This process was told to stop before it had every fragment."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
  """How a link behaves towards its syncer.

  Attributes:
    takeover: Fence a live process of the same id.
    connect_timeout_s: How long the first join may take.
    max_solo_s: How long a joined learner goes on without a syncer.
    reconnect_max_s: Longest pause between two attempts.
  """

  takeover: bool = False
  connect_timeout_s: float = 120.0
  max_solo_s: float = 3600.0
  reconnect_max_s: float = 1.0


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
    self._nonce = uuid.uuid4().hex
    self._changed = threading.Condition()
    self._run: port.RunSpec | None = None
    self._welcome: port.Welcomed | None = None
    self._control: port.Control | None = None
    self._stamp = port.Stamp()
    self._applied: dict[int, events.Applied] = {}
    self._reported: events.Reported | None = None
    self._copies: dict[int, port.Copy] = {}
    self._earlier: dict[int, port.Copy] = {}
    self._pulls: dict[int, port.PullNotice] = {}
    self._wanted: dict[int, port.PublishedNotice] = {}
    self._ready: dict[int, port.Publication] = {}
    self._newest: dict[int, events.Version] = {}
    self._last_slot = -1
    self._num_changes = 0  # What the loop would look at.
    self._num_seen = 0
    self._ending: str | None = None
    self._finished: port.FinishedNotice | None = None
    self._error: BaseException | None = None
    self._left = False
    self._threads: list[threading.Thread] = []

  # --- Port --------------------------------------------------------------------

  @property
  def run(self) -> port.RunSpec:
    """The run's settings; asks the syncer the first time, and waits for it."""
    if self._run is None:
      run = self._retry(
        self._sync.get_run, self._cfg.connect_timeout_s, "GetRun"
      )
      assert run is not None, "the link was left before it had a run"
      self._run = run
    return self._run

  def start(self) -> port.Welcomed:
    """Joins and fetches every fragment; `published` then has all of them."""
    num_fragments = self.run.layout.num_fragments
    for target in (self._read, self._push, self._fetch, self._beat):
      thread = threading.Thread(
        target=self._guard, args=(target,), name=target.__name__, daemon=True
      )
      self._threads.append(thread)
      thread.start()
    with self._changed:
      while len(self._ready) < num_fragments:
        self._changed.wait(_LOOK_S)
        self._raise()
        if self._should_stop():
          raise Stopped(f"learner {self._learner} was told to stop")
      assert self._welcome
      return self._welcome

  def published(self) -> Sequence[port.Publication]:
    with self._changed:
      self._raise()
      ready, self._ready = self._ready, {}
    return [ready[p] for p in sorted(ready)]

  def adopted(
    self,
    publication: port.Publication,
    step: int,
    counts: events.Counts,
  ) -> None:
    fragment = publication.fragment
    applied = events.Applied(
      fragment=fragment,
      version=publication.version,
      step=step,
      counts=counts,
      exact=publication.exact,
    )
    with self._changed:
      self._applied[fragment] = applied
      self._copies.pop(fragment, None)
      self._earlier.pop(fragment, None)
      if self._reported:
        self._reported = _without(self._reported, fragment)
      self._send(applied)

  def due_next(self, step_s: float) -> Sequence[int]:
    run = self.run
    num = run.layout.num_fragments
    with self._changed:
      start, slot_s = self._last_slot + 1, self._stamp.step_s
      pulled = list(self._pulls)
    slot_s *= run.cycle_steps / num
    ahead = math.ceil(step_s / slot_s) if slot_s > 0 and step_s > 0 else 1
    due = [(start + i) % num for i in range(min(num, 1 + ahead))]
    return list(dict.fromkeys(pulled + due))

  def offer(self, copies: dict[int, port.Copy]) -> None:
    """Takes this boundary's copies; see the Port.

    Until the device has made one, that of the boundary before answers.
    """
    with self._changed:
      self._earlier, self._copies = self._copies, copies
      self._changed.notify_all()

  def report(self, report: events.Reported) -> None:
    with self._changed:
      self._reported = report
      self._send(report)

  def stamp(self) -> port.Stamp:
    return self._stamp

  def ending(self) -> str | None:
    return self._ending

  def finished(self) -> port.FinishedNotice | None:
    return self._finished

  def wait(self, timeout_s: float) -> bool:
    with self._changed:
      self._raise()
      changed = self._changed.wait_for(
        lambda: self._num_changes != self._num_seen, timeout_s
      )
      self._num_seen = self._num_changes
      return changed

  def leave(self, reason: str) -> None:
    """Says goodbye, unless the run has finished, and ends the threads."""
    with self._changed:
      over = self._finished or self._error
      self._left = True
      self._changed.notify_all()
    control = self._control
    if control and not over:
      self._send(events.Left(reason=reason))
    if control:
      control.close()
    for thread in self._threads:
      thread.join(timeout=5.0)

  # --- threads -------------------------------------------------------------------

  def _guard(self, target: Callable[[], None]) -> None:
    try:
      target()
    except BaseException as error:
      with self._changed:
        self._error = self._error or error
        self._num_changes += 1
        self._changed.notify_all()

  def _read(self) -> None:
    """Reads notices; joins again when the stream breaks."""
    timeout_s = self._cfg.connect_timeout_s
    while not self._over():
      control = self._retry(self._join, timeout_s, "Join")
      if control is None:
        return
      timeout_s = self._cfg.max_solo_s
      try:
        for stamp, notice in control.notices():
          self._take(stamp, notice)
      except ServiceError as error:
        if not error.is_worth_retrying:
          raise
        _log.warning("link of %s: %s; joins again", self._learner, error)
      if not self._over():
        time.sleep(random.uniform(0.02, 0.1))

  def _join(self) -> port.Control | None:
    with self._changed:
      if self._left:
        return None
      num = self.run.layout.num_fragments
      known = len(self._applied) == num
      bases = [self._applied[p].version for p in range(num)] if known else []
    hello = port.Hello(
      learner=self._learner,
      nonce=self._nonce,
      layout_digest=self.run.layout.digest(),
      run_id=self.run.run_id,
      takeover=self._cfg.takeover,
      bases=tuple(bases),
    )
    control = self._sync.join(hello)
    stamp, welcome = next(control.notices())
    assert isinstance(welcome, port.Welcomed), welcome
    with self._changed:
      if not (welcome.reconnect and self._epoch() == welcome.epoch):
        self._pulls.clear()
      self._control = control
      self._stamp = stamp
      self._welcome = welcome
      self._resume(welcome)
      self._say_again(bases)
      self._changed.notify_all()
    return control

  def _resume(self, welcome: port.Welcomed) -> None:
    """Asks for what was published, or rolled back, while nobody listened."""
    for p, clock in enumerate(welcome.clocks):
      newest = self._newest.get(p)
      if newest and self._is_rolled_back(p, newest):
        del self._newest[p]
        self._ready.pop(p, None)
      if not self._is_known(p, clock.version):
        self._wanted[p] = port.PublishedNotice(
          fragment=p,
          version=clock.version,
          outcome=events.Outcome.NOT_ASKED,
        )

  def _say_again(self, bases: Sequence[events.Version]) -> None:
    """What the loop said while no stream, or an older one, listened."""
    for p, applied in self._applied.items():
      if not bases or applied.version != bases[p]:
        self._send(applied)
    if self._reported:
      self._send(self._reported)

  def _epoch(self) -> int:
    return self._welcome.epoch if self._welcome else 0

  def _is_rolled_back(self, p: int, version: events.Version) -> bool:
    """Whether the newest start of the syncer has lost a version."""
    welcome = self._welcome
    assert welcome
    return version.epoch < welcome.epoch and version.n > welcome.clocks[p].n0

  def _is_known(self, p: int, version: events.Version) -> bool:
    newest = self._newest.get(p)
    return bool(newest) and (newest == version or newest.n > version.n)

  def _take(self, stamp: port.Stamp, notice: port.Notice) -> None:
    with self._changed:
      self._stamp = stamp
      match notice:
        case port.PullNotice(fragment=p):
          self._pulls[p] = notice
          self._last_slot = p
        case port.PublishedNotice(fragment=p):
          self._wanted[p] = notice
          num = self.run.layout.num_fragments
          if (p - self._last_slot) % num <= num // 2:
            self._last_slot = p  # Others were pulled, and are ahead.
        case port.GivenUpNotice(fragment=p):
          pull = self._pulls.get(p)
          if pull and (pull.round, pull.attempt) == (
            notice.round,
            notice.attempt,
          ):
            del self._pulls[p]
        case port.EndingNotice():
          self._ending = notice.reason
        case port.FinishedNotice():
          self._finished = notice
      self._num_changes += 1
      self._changed.notify_all()

  def _push(self) -> None:
    """Answers pulls, one at a time, from the newest copies."""
    while (answer := self._next_answer()) is not None:
      pull, copy, session = answer
      p = pull.fragment
      leaves = self.run.layout.fragment(p)
      delta = deltas.delta(copy.base, copy.arrays)
      data = codec.encode(delta, leaves, self.run.up_format)
      header = port.ReplyHeader(
        session=session,
        fragment=p,
        round=pull.round,
        attempt=pull.attempt,
        base=copy.base_version,
        counts=copy.counts,
        lr_sum=copy.lr_sum,
        positions=copy.positions,
        format=self.run.up_format,
        num_bytes=len(data),
      )
      self._deliver(header, data)

  def _next_answer(
    self,
  ) -> tuple[port.PullNotice, port.Copy, port.Session] | None:
    def known() -> int | None:
      offered = self._copies.keys() | self._earlier.keys()
      return next((p for p in self._pulls if p in offered), None)

    with self._changed:
      self._changed.wait_for(lambda: self._over() or known() is not None)
      if self._over():
        return None
      p = known()
      assert p is not None
      assert self._welcome
      copy = self._copies.get(p)
      earlier = None if self._ending else self._earlier.get(p)
      if copy is None or (earlier and not _is_ready(copy)):
        copy = earlier
      assert copy
      return self._pulls.pop(p), copy, self._welcome.session

  def _deliver(self, header: port.ReplyHeader, data: bytearray) -> None:
    """Pushes one reply; a retry is safe, since a reply is named once."""
    while not self._over():
      try:
        result = self._sync.push(
          header, codec.chunks(data, self.run.chunk_bytes)
        )
      except ServiceError as error:
        welcome = self._welcome
        renewed = welcome and welcome.session != header.session
        if renewed or not error.is_worth_retrying:
          _log.warning("reply of %s is lost: %s", self._learner, error)
          return
        time.sleep(random.uniform(0.1, self._cfg.reconnect_max_s))
        continue
      if result.outcome not in (
        events.Outcome.ACCEPTED,
        events.Outcome.CARRIED,
      ):
        _log.info(
          "reply of %s: %s: %s", self._learner, result.outcome, result.reason
        )
      return

  def _fetch(self) -> None:
    """Fetches and decodes the newest version of what was published."""
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._over() or self._wanted)
        if self._over():
          return
        p = next(iter(self._wanted))
        notice = self._wanted.pop(p)
        assert self._welcome
        session = self._welcome.session
        if self._is_known(p, notice.version) and not notice.exact:
          continue
      try:
        header, data = self._sync.fetch(session, p, 0, notice.exact)
      except ServiceError as error:
        if not (error.is_worth_retrying or error.is_of_session):
          raise
        with self._changed:
          self._wanted.setdefault(p, notice)
        time.sleep(random.uniform(0.1, self._cfg.reconnect_max_s))
        continue
      leaves = self.run.layout.fragment(p)
      publication = port.Publication(
        fragment=p,
        version=header.version,
        arrays=codec.decode(data, leaves, header.format),
        exact=notice.exact,
      )
      with self._changed:
        if self._is_rolled_back(p, header.version):
          continue  # Since it was asked for; the newest is wanted already.
        self._newest[p] = header.version
        self._ready[p] = publication
        self._num_changes += 1
        self._changed.notify_all()

  def _beat(self) -> None:
    """Shows life while the loop compiles, restores or waits."""
    with self._changed:
      while not self._over():
        if self._control:
          self._send(events.Heard())
        self._changed.wait_for(self._over, self.run.lease_s / 5)

  # --- small -----------------------------------------------------------------------

  def _over(self) -> bool:
    return bool(self._left or self._error or self._finished)

  def _raise(self) -> None:
    if self._error:
      raise self._error

  def _send(self, message: port.Upward) -> None:
    control = self._control
    if control:
      control.send(message)

  def _retry(
    self, call: Callable[[], T], timeout_s: float, what: str
  ) -> T | None:
    """Calls until it works; gives up after a time without a syncer."""
    start = time.monotonic()
    said = 0.0
    while True:
      try:
        return call()
      except ServiceError as error:
        waited_s = time.monotonic() - start
        if not error.is_worth_retrying:
          raise
        if waited_s > timeout_s:
          raise SyncerLost(
            f"no syncer answered {what} for {waited_s:.0f} s (limit"
            f" {timeout_s:.0f} s): {error}. Start the syncer, or correct"
            " --syncer."
          ) from error
        if waited_s - said >= 5 or said == 0:
          said = max(waited_s, 0.001)
          _log.warning(
            "learner %s waits for the syncer (%s, %.0f of %.0f s): %s",
            self._learner,
            what,
            waited_s,
            timeout_s,
            error,
          )
      if self._left:
        return None
      if self._welcome is None and self._should_stop():
        raise Stopped(f"learner {self._learner} was told to stop")
      time.sleep(random.uniform(0.1, self._cfg.reconnect_max_s))


def _without(report: events.Reported, fragment: int) -> events.Reported:
  """A report once a fragment's counts have started again."""
  counts = list(report.counts)
  counts[fragment] = events.Counts()
  return dataclasses.replace(
    report,
    counts=tuple(counts),
    boundaries=tuple(b for b in report.boundaries if b[0] != fragment),
  )


def _is_ready(copy: port.Copy) -> bool:
  """Whether reading a copy would not wait for a device."""
  return all(
    array.is_ready()
    for array in copy.arrays.values()
    if hasattr(array, "is_ready")
  )
