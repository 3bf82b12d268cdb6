"""The synchronizer as one plain object: receipts to the machine, tensors to the merger.

It implements `wire.port.Synchronizer`; gRPC only carries it. Its lock covers a
step of the state machine and the routing of what was decided, which only fills
queues. (arXiv 2604.21428, Sec. 3.)
"""

import dataclasses
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from ddiloco_jax.algorithm import merge
from ddiloco_jax.protocol import (
  check,
  events,
  machine,
  recovery,
  snapshots,
  status,
)
from ddiloco_jax.protocol.state import Cut
from ddiloco_jax.syncer import checks, notices
from ddiloco_jax.syncer.control import Control
from ddiloco_jax.syncer.errors import Superseded
from ddiloco_jax.syncer.inbox import Inbox, Reply
from ddiloco_jax.syncer.merger import Merger, Tensors
from ddiloco_jax.wire import codec, port
from ddiloco_jax.wire.status import ServiceError

_KEPT = (events.Outcome.ACCEPTED, events.Outcome.CARRIED)


class CutFiles(NamedTuple):
  """What writes cuts, from a thread of its own.

  Attributes:
    save: Writes the syncer's part of a cut, given its number; returns the cut's
      path once it is on disk.
    name: Writes what a cut holds; only then it is one.
    failed: Told of what one of these raised; the run goes on without the cut.
  """

  save: Callable[[int, Tensors, machine.State], str]
  name: Callable[[events.SnapshotOver], None]
  failed: Callable[[int, Exception], None]


class Syncer:
  """Serves one run from one process.

  Args:
    spec: What learners are told of the run.
    state: Of the machine; fresh or restored, and not at its end.
    record: Called with (event, effects, state) for every event, in order,
      under the lock: it must be quick.
    make_merger: Builds the merger, given the callbacks `done` and `failed`.
    now: Seconds since the run began, monotonic.
    cut_files: See CutFiles. Without them no cut is taken.
  """

  def __init__(
    self,
    spec: port.RunSpec,
    state: machine.State,
    record: Callable[..., None],
    make_merger: Callable[..., Merger],
    now: Callable[[], float] = time.monotonic,
    cut_files: CutFiles | None = None,
  ):
    assert state.end is None, "a run that has ended is not served"
    self._spec = spec
    self._state = state
    self._record = record
    self._now = now
    self._cut_files = cut_files
    self._cuts: dict[int, events.SnapshotOver] = {}
    self._lock = threading.RLock()
    self._changed = threading.Condition(self._lock)
    self._controls: dict[tuple[str, int], Control] = {}
    self._secrets: dict[tuple[str, int], str] = {}
    self._inbox = Inbox()
    self._bytes_down = 0
    self._alarms: tuple[str, ...] = ()
    self._finished: events.Finished | None = None
    self._error: BaseException | None = None
    self._over = threading.Event()  # Finished, or failed.
    self._merger = make_merger(done=self._feed, failed=self._fail)
    self._timer = threading.Thread(
      target=self._run_timer, name="timer", daemon=True
    )
    self._timer.start()

  @property
  def max_learners(self) -> int:
    return self._state.rules.max_learners

  # --- what learners call ------------------------------------------------------

  def get_run(self) -> port.RunSpec:
    return self._spec

  def join(self, hello: port.Hello) -> Control:
    """Admits a learner; the first notice of its stream is Welcomed.

    Raises:
      ServiceError: FAILED_PRECONDITION for another protocol, run or layout;
        what the machine says otherwise.
    """
    checks.check_hello(hello, self._spec)
    control = Control(
      receive=lambda event: self._hear(control, event),
      stamp=self._stamp,
      heartbeat_s=self._spec.lease_s / 3,
    )
    event = events.Joined(
      learner=hello.learner,
      nonce=hello.nonce,
      takeover=hello.takeover,
      bases=hello.bases,
      max_replies=hello.max_replies,
      state_address=hello.state_address,
      takes_shards=hello.takes_shards,
      resumes=hello.resumes,
      reads=hello.reads,
      returned=hello.returned,
      adoptions=tuple(applied.adoption for applied in hello.adoptions),
    )
    self._check(event)
    for effect in self._feed(event, control):
      if isinstance(effect, events.Reject):
        raise ServiceError(effect.code, effect.reason)
    return control

  def push(
    self, header: port.ReplyHeader, chunks: Iterable[bytes | memoryview]
  ) -> port.PushResult:
    """Receives one reply whole, then asks the machine what becomes of it.

    Raises:
      ServiceError: INVALID_ARGUMENT for a header, length or count that cannot
        be; UNAUTHENTICATED or ABORTED for a session that is not current; what
        `chunks` raises.
    """
    self._check_session(header.session)
    checks.check_reply(header, self._spec)
    key = events.ReplyKey(
      header.session.learner,
      header.session.incarnation,
      header.fragment,
      header.round,
      header.attempt,
    )
    refused = _outcome(key, self._feed(_about(events.Pushing, key)))
    if refused:
      return refused
    try:
      buffer = self._inbox.receive(
        key,
        header.num_bytes,
        chunks,
        lambda n: self._feed(_about(events.Pushing, key, num_bytes=n)),
      )
      return self._take_reply(key, header, buffer)
    except BaseException as error:
      self._feed(_about(events.PushBroken, key, reason=str(error)))
      raise

  def fetch(
    self, session: port.Session, fragment: int, n: int, exact: bool
  ) -> tuple[port.FragmentHeader, bytearray]:
    """A kept version of a fragment; the buffer is shared and read only.

    Raises:
      ServiceError: INVALID_ARGUMENT for a fragment or version not kept;
        UNAUTHENTICATED or ABORTED for a session that is not current.
    """
    self._check_session(session)
    checks.check_fragment(fragment, self._spec)
    kept = self._merger.get(fragment, n, exact)
    if kept is None:
      raise ServiceError(
        "INVALID_ARGUMENT",
        f"version {n} of fragment {fragment} is not kept: only the last two"
        " are. Ask for n = 0, the newest.",
      )
    self._bytes_down += len(kept.data)
    header = port.FragmentHeader(
      fragment=fragment,
      version=kept.version,
      format=kept.format,
      num_bytes=len(kept.data),
      crc32=kept.crc32,
    )
    return header, kept.data

  def donor_for(
    self, session: port.Session, preferred: str, but_not: Collection[str]
  ) -> events.Donor:
    """A healthy learner whose state may be relayed to a joined one.

    Args:
      session: Of the one that asks.
      preferred: Taken, as long as it is healthy.
      but_not: Donors that gave it nothing.

    Raises:
      ServiceError: a session that is not current; UNAVAILABLE where nobody
        serves its state.
    """
    self._check_session(session)
    with self._lock:
      donor = recovery.donor_for(
        self._state, session.learner, preferred, but_not
      )
    if donor is None:
      raise ServiceError(
        "UNAVAILABLE",
        "no healthy learner serves its state now. Take a checkpoint's, or"
        " begin with fresh moments.",
      )
    return donor

  def status(self) -> status.Status:
    """A consistent view of the run, for people and dashboards."""
    with self._lock:
      view = status.status(self._state, self._now())
    return dataclasses.replace(
      view,
      run_id=self._spec.run_id,
      bytes_up=self._inbox.num_bytes,
      bytes_down=self._bytes_down,
      alarms=(*view.alarms, *self._alarms),
    )

  # --- what its process calls --------------------------------------------------

  @property
  def state(self) -> machine.State:
    """The newest one of the machine."""
    return self._state

  def alarm(self, reason: str) -> None:
    """Shows the newest fault of this process in every status."""
    self._alarms = (reason,)

  def request_stop(self, reason: str) -> None:
    """Ends the run in order: flush, exact publication, goodbye."""
    self._feed(events.StopRequested(reason=reason))

  def evict(self, learner: str, reason: str) -> int:
    """Fences a learner's process; returns its incarnation.

    Raises:
      ServiceError: INVALID_ARGUMENT for an id that has no process here.
    """
    event = events.EvictRequested(learner=learner, reason=reason)
    with self._lock:
      self._check(event)
      self._feed(event)
      return self._state.learners[learner].incarnation

  def request_snapshot(self) -> None:
    """Begins a consistent cut, unless one is under way, and does not wait."""
    self._feed(events.SnapshotRequested())

  def take_snapshot(self) -> events.SnapshotOver:
    """Takes a consistent cut of the run, or joins the one under way.

    Raises:
      ServiceError: FAILED_PRECONDITION where there is none to be had, ABORTED
        where it was given up; with the reason.
    """
    if self._cut_files is None:
      raise ServiceError(
        "FAILED_PRECONDITION",
        "this syncer has no directory to put a snapshot into.",
      )
    with self._changed:
      effects = self._feed(events.SnapshotRequested())
      ended = (e for e in effects if isinstance(e, events.SnapshotOver))
      over, cut = next(ended, None), self._state.cut
      if over is None:
        assert cut, "a requested cut is under way"
        self._changed.wait_for(
          lambda: cut.snapshot in self._cuts or self._over.is_set()
        )
        over = self._cuts.get(cut.snapshot)
      elif not over.snapshot:
        raise ServiceError("FAILED_PRECONDITION", f"{over.reason}.")
    reason = "the syncer has ended" if over is None else over.reason
    if reason or over is None:
      raise ServiceError("ABORTED", f"no snapshot was taken: {reason}.")
    return over

  def wait(self, timeout_s: float) -> events.Finished | None:
    """Blocks until the run has finished, at most `timeout_s`.

    Raises:
      Exception: what ended a thread of the syncer.
    """
    self._over.wait(timeout_s)
    if self._error:
      raise self._error
    return self._finished

  def snapshot(self) -> tuple[Tensors, machine.State]:
    """Tensors and machine state of one moment between two merges."""
    return self._merger.snapshot(lambda: self._state)

  def close(self) -> machine.State:
    """Ends every stream and thread; returns the last state."""
    with self._changed:
      self._finished = self._finished or events.Finished(
        reason="the syncer was closed", exit_code=1
      )
      for who in list(self._controls):
        self._end(who)
      self._over.set()
      self._changed.notify_all()
    self._timer.join()
    self._merger.close()
    return self._state

  # --- events in, effects out --------------------------------------------------

  def _feed(
    self, event: events.Event, control: Control | None = None
  ) -> tuple[events.Effect, ...]:
    try:
      with self._changed:
        event = dataclasses.replace(event, time=self._now())
        state, effects = machine.step(self._state, event)
        self._record(event, effects, state)  # What is not on it has not been.
        self._state = state
        for effect in effects:
          self._route(effect, control)
        self._changed.notify_all()
    except BaseException as error:
      self._fail(error)  # A tape that cannot be written ends the run.
      raise
    return effects

  def _route(self, effect: events.Effect, control: Control | None) -> None:
    match effect:
      case events.Welcome():
        assert control
        self._welcome(effect, control)
      case events.Fence(learner=learner, incarnation=incarnation):
        error = ServiceError("ABORTED", effect.reason)
        self._end((learner, incarnation), error)
      case events.Merge():
        replies = [self._inbox.take(item.key) for item in effect.inputs]
        self._merger.merge(effect, replies)
      case events.Marker():
        threading.Thread(
          target=self._capture,
          args=(effect, self._state),
          name="snapshot",
          daemon=True,
        ).start()
      case events.SnapshotOver(snapshot=number):
        self._cuts[number] = effect
      case events.Free(key=key):
        self._inbox.free(key)
      case events.Finished():
        self._finished = effect
        self._over.set()
    for learner, incarnation, notice in notices.addressed(effect):
      if told := self._controls.get((learner, incarnation)):
        told.tell(self._stamp(), notice)
    if notice := notices.to_all(effect):
      for told in self._controls.values():
        told.tell(self._stamp(), notice)
    if isinstance(effect, events.Finished):
      for who in list(self._controls):
        self._end(who)

  def _capture(self, marker: events.Marker, state: machine.State) -> None:
    """Copies the syncer's part of a cut, then writes it, then names the cut.

    The state is that of the marker: whatever a learner has said in it, the
    learner had done before it saved its own part.
    """
    try:
      tensors, _ = self.snapshot()
      self._feed(events.Captured(snapshot=marker.snapshot))
      if captured := self._write_cut(marker.snapshot, tensors, state):
        self._feed(captured)
    except BaseException as error:
      self._fail(error)

  def _write_cut(
    self, number: int, tensors: Tensors, state: machine.State
  ) -> events.Captured | None:
    """Where a cut is on disk, or why not; None if it is over before."""
    files = self._cut_files
    assert files
    try:
      path = files.save(number, tensors, state)
      cut = self._await_answers(number)
      if cut is None:
        return None
      files.name(snapshots.result(cut._replace(path=path)))
    except Superseded:
      raise
    except Exception as error:  # The run goes on without this cut.
      files.failed(number, error)
      why = str(error) or repr(error)
      return events.Captured(snapshot=number, failure=why)
    return events.Captured(snapshot=number, path=path)

  def _await_answers(self, number: int) -> Cut | None:
    """A cut that every learner has answered, or is late for; None: it is over."""
    with self._changed:
      while (cut := self._state.cut) and cut.snapshot == number:
        if self._over.is_set():
          return None
        if not cut.awaited:
          return cut
        self._changed.wait()
    return None

  def _welcome(self, effect: events.Welcome, control: Control) -> None:
    who = effect.learner, effect.incarnation
    self._end(who)  # An older stream of the same incarnation.
    secret = self._secrets.setdefault(who, secrets.token_hex(16))
    control.session = port.Session(
      learner=effect.learner, incarnation=effect.incarnation, secret=secret
    )
    self._controls[who] = control
    notice = port.Welcomed(
      session=control.session,
      run_id=self._spec.run_id,
      epoch=self._spec.epoch,
      clocks=effect.clocks,
      positions=effect.positions,
      reconnect=effect.reconnect,
      donor=effect.donor,
    )
    control.tell(self._stamp(), notice)

  def _end(
    self, who: tuple[str, int], error: ServiceError | None = None
  ) -> None:
    if control := self._controls.pop(who, None):
      control.end(error)

  def _hear(
    self, control: Control, event: port.Upward | events.Disconnected
  ) -> None:
    session = control.session
    assert session
    who = session.learner, session.incarnation
    with self._lock:
      if self._controls.get(who) is not control:
        return  # The last words of a stream that was replaced.
      event = dataclasses.replace(
        event, learner=session.learner, incarnation=session.incarnation
      )
      self._check(event)
      self._feed(event)
      if isinstance(event, events.Left | events.Disconnected):
        self._end(who)

  def _take_reply(
    self, key: events.ReplyKey, header: port.ReplyHeader, buffer: bytearray
  ) -> port.PushResult:
    leaves = self._spec.layout.fragment(key.fragment)
    delta = codec.decode(buffer, leaves, header.format)
    event = _about(
      events.Replied,
      key,
      base=header.base,
      counts=header.counts,
      norm=merge.norm(delta),
      lr_sum=header.lr_sum,
      positions=header.positions,
    )
    data = buffer if self._merger.records else b""
    reply = Reply(delta, header.format, data)
    with self._lock:  # A merge may follow at once: the tensors come first.
      self._check(event)
      fresh = self._inbox.keep(key, reply)
      result = _outcome(key, self._feed(event))
      assert result, f"the machine said nothing of reply {key}"
      if fresh and result.outcome not in _KEPT:
        self._inbox.free(key)
    return result

  def _run_timer(self) -> None:
    try:
      with self._changed:
        while not self._over.is_set():
          due = machine.next_timer(self._state)
          wait_s = None if due is None else due - self._now()
          if wait_s is not None and wait_s <= 0:
            self._feed(events.Ticked())
          else:
            self._changed.wait(wait_s)
    except BaseException as error:
      self._fail(error)

  def _fail(self, error: BaseException) -> None:
    with self._changed:
      self._error = self._error or error
      self._over.set()
      self._changed.notify_all()

  def _stamp(self) -> port.Stamp:
    return port.Stamp(t=self._state.t, step_s=self._state.step_s or 0.0)

  # --- checks against the state ------------------------------------------------

  def _check_session(self, session: port.Session) -> None:
    who = session.learner, session.incarnation
    secret = self._secrets.get(who, "")
    if not (
      secret and hmac.compare_digest(secret.encode(), session.secret.encode())
    ):
      raise ServiceError(
        "UNAUTHENTICATED",
        f"learner {session.learner!r}, incarnation {session.incarnation}: the"
        " session secret is not the one of its welcome. Join first, and send"
        " the secret of Welcome with every push and fetch.",
      )
    newest = self._state.learners[session.learner]
    over = f"incarnation {session.incarnation} of learner {session.learner!r} is over"
    if session.incarnation != newest.incarnation:
      raise ServiceError(
        "ABORTED",
        f"{over}: incarnation {newest.incarnation} has joined since. This"
        " process must exit.",
      )
    if newest.gone:
      raise ServiceError(
        "ABORTED",
        f"{over}: it said goodbye or was fenced. Its control stream says"
        " which, and whether it may join again.",
      )

  def _check(self, event: events.Event) -> None:
    try:
      check.check(self._state, event)
    except ValueError as error:
      if isinstance(event, events.LearnerEvent):
        self._feed(
          events.Misspoke(
            learner=event.learner,
            incarnation=event.incarnation,
            reason=str(error),
          )
        )
      raise ServiceError("INVALID_ARGUMENT", str(error)) from error


def _about(kind: type, key: events.ReplyKey, **fields) -> events.LearnerEvent:
  """An event about one reply."""
  if kind is events.Pushing:
    fields.setdefault("num_bytes", 0)
  return kind(**key._asdict(), **fields)


def _outcome(
  key: events.ReplyKey, effects: tuple[events.Effect, ...]
) -> port.PushResult | None:
  for effect in effects:
    if isinstance(effect, events.Resolved) and effect.key == key:
      return port.PushResult(
        outcome=effect.outcome, reason=effect.reason, first=effect.first
      )
  return None
