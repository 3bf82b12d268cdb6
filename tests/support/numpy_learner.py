"""A learner of plain numpy for tests that need many, slow or hostile ones.

It speaks to any Synchronizer (a client over gRPC, or the syncer itself), takes
steps of a modelled length on a quadratic, and remembers what it was told. The
parameters move towards `target` by `rate` of the way in every step.
"""

import dataclasses
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping

import numpy as np

from ddiloco_jax.protocol import events
from ddiloco_jax.wire import codec, port
from ddiloco_jax.wire.status import ServiceError

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spoil:
  """How a hostile learner spoils its replies."""

  delta: Callable[[Arrays], Arrays] = lambda delta: delta
  header: Callable[[port.ReplyHeader], port.ReplyHeader] = lambda header: header
  times: int = 1  # How often each reply is pushed.


def _fill(value: float) -> Spoil:
  return Spoil(
    delta=lambda delta: {
      path: np.full_like(array, value) for path, array in delta.items()
    }
  )


def _forge(header: port.ReplyHeader) -> port.ReplyHeader:
  session = dataclasses.replace(header.session, secret="forged")
  return dataclasses.replace(header, session=session)


def _age(header: port.ReplyHeader) -> port.ReplyHeader:
  incarnation = header.session.incarnation - 1
  session = dataclasses.replace(header.session, incarnation=incarnation)
  return dataclasses.replace(header, session=session)


HONEST = Spoil()
SPOILS = {
  "nan": _fill(np.nan),
  "inf": _fill(np.inf),
  "huge": _fill(1e30),
  "forged": Spoil(header=_forge),
  "twice": Spoil(times=2),
  "old_incarnation": Spoil(header=_age),
  "not_asked": Spoil(
    header=lambda header: dataclasses.replace(header, round=header.round + 99)
  ),
}


@dataclasses.dataclass(frozen=True)
class _Copy:
  arrays: Arrays
  base: Arrays
  version: events.Version
  counts: events.Counts
  position: events.Position


class NumpyLearner(threading.Thread):
  """Trains on a thread of its own, once started, until the run ends.

  Args:
    synchronizer: What it joins.
    name: Its id.
    step_s: Modelled length of a step.
    tokens: Loss tokens of a step.
    max_steps: Its data is exhausted after so many steps; 0: never.

  Attributes:
    step: Steps taken.
    theta: Its parameters, path -> float32 array.
    versions: Per fragment, the version that it trains from.
    results: Of every push: (header, PushResult or ServiceError).
    published: Every PublishedNotice.
    welcomes: One for each time that it joined.
    finished: The run's last word to it.
    error: What ended it, if not the run.
  """

  def __init__(
    self,
    synchronizer: port.Synchronizer,
    name: str,
    *,
    step_s: float = 0.02,
    target: float = 1.0,
    rate: float = 0.1,
    tokens: int = 100,
    max_steps: int = 0,
    takeover: bool = False,
    spoil: Spoil = HONEST,
  ):
    super().__init__(name=f"learner-{name}", daemon=True)
    self.sync = synchronizer
    self.learner = name
    self.step_s = step_s
    self.target = np.float32(target)
    self.rate = np.float32(rate)
    self.tokens = tokens
    self.max_steps = max_steps
    self.takeover = takeover
    self.spoil = spoil
    self.nonce = uuid.uuid4().hex
    self.step = 0
    self.theta: dict[str, np.ndarray] = {}
    self.versions: dict[int, events.Version] = {}
    self.results: list[tuple[port.ReplyHeader, object]] = []
    self.published: list[port.PublishedNotice] = []
    self.welcomes: list[port.Welcomed] = []
    self.finished: port.FinishedNotice | None = None
    self.error: BaseException | None = None
    self._changed = threading.Condition()
    self._counts: dict[int, events.Counts] = {}
    self._bases: dict[int, Arrays] = {}
    self._copies: dict[int, _Copy] = {}
    self._fresh: dict[int, tuple[events.Version, Arrays, bool]] = {}
    self._transfers: queue.SimpleQueue = queue.SimpleQueue()
    self._position = events.Position(0, 0)
    self._over = threading.Event()
    self._ending = False
    self._control: port.Control | None = None

  # --- what tests call ---------------------------------------------------------

  def kill(self) -> None:
    """Vanishes, as by SIGKILL: no goodbye."""
    self._over.set()
    if self._control:
      self._control.close()
    self._wake()

  def leave(self, reason: str = "leaves") -> None:
    if self._control:
      self._control.send(events.Left(reason=reason))
    self.kill()

  def outcomes(self) -> list[str]:
    """What became of each push: an outcome or an error's code."""
    return [
      result.code if isinstance(result, ServiceError) else result.outcome.value
      for _, result in self.results
    ]

  def num_included(self) -> int:
    """Publications that included a reply of this learner."""
    included = events.Outcome.INCLUDED
    return sum(notice.outcome == included for notice in self.published)

  def wait_for(
    self, condition: Callable[[], object], timeout_s: float = 20.0
  ) -> None:
    """Blocks until something holds of this learner."""
    with self._changed:
      if not self._changed.wait_for(
        lambda: condition() or self.error, timeout_s
      ):
        raise TimeoutError(f"learner {self.learner} after {timeout_s} s")
    if self.error:
      raise self.error

  # --- its threads ---------------------------------------------------------------

  def run(self) -> None:
    self._guard(self._train)

  def _guard(self, target: Callable[[], None]) -> None:
    try:
      target()
    except BaseException as error:
      if not self._over.is_set():
        self.error = self.error or error
      self.kill()

  def _train(self) -> None:
    self._run = self._retry(self.sync.get_run)
    notices = threading.Thread(
      target=self._guard, args=[self._listen], daemon=True
    )
    notices.start()
    num = self._run.layout.num_fragments
    with self._changed:
      self._changed.wait_for(
        lambda: len(self._fresh) == num or self._over.is_set()
      )
    while not self._over.is_set():
      self._adopt()
      exhausted = bool(self.max_steps) and self.step >= self.max_steps
      if not (self._ending or exhausted):
        self._take_step()
      if not self._ending:
        self._say(self._report(exhausted))
      idle = self._ending or exhausted
      self._over.wait(max(self.step_s, 0.02 if idle else 0.0))
    self._wake()

  def _listen(self) -> None:
    transfers = threading.Thread(
      target=self._guard, args=[self._transfer], daemon=True
    )
    transfers.start()
    while not self._over.is_set():
      try:
        self._join()
        for _, notice in self._control.notices():
          self._take(notice)
      except ServiceError as error:
        if not error.is_worth_retrying:
          raise
      self._over.wait(0.05)

  def _join(self) -> None:
    num = self._run.layout.num_fragments
    known = len(self.versions) == num
    hello = port.Hello(
      learner=self.learner,
      nonce=self.nonce,
      layout_digest=self._run.layout.digest(),
      takeover=self.takeover,
      bases=tuple(self.versions[p] for p in range(num)) if known else (),
    )
    self._control = self.sync.join(hello)
    _, welcome = next(self._control.notices())
    assert isinstance(welcome, port.Welcomed), welcome
    self.welcomes.append(welcome)
    if len(self.welcomes) == 1 and welcome.positions:
      self._position = welcome.positions[0]
    for p in range(num):
      self._transfers.put(("fetch", p, False))
    self._wake()

  def _take(self, notice: port.Notice) -> None:
    match notice:
      case port.PullNotice():
        self._transfers.put(("push", notice, None))
      case port.PublishedNotice():
        self.published.append(notice)
        self._transfers.put(("fetch", notice.fragment, notice.exact))
      case port.EndingNotice():
        self._ending = True
      case port.FinishedNotice():
        self.finished = notice
        self._over.set()
    self._wake()

  def _transfer(self) -> None:
    while not self._over.is_set():
      try:
        kind, what, exact = self._transfers.get(timeout=0.2)
      except queue.Empty:
        self._say(events.Heard())
        continue
      if kind == "push":
        self._answer(what)
      else:
        self._fetch(what, exact)
      self._wake()

  def _fetch(self, p: int, exact: bool) -> None:
    leaves = self._run.layout.fragment(p)
    header, data = self._retry(
      lambda: self.sync.fetch(self.welcomes[-1].session, p, 0, exact)
    )
    arrays = codec.decode(data, leaves, header.format)
    with self._changed:
      self._fresh[p] = header.version, arrays, exact

  def _answer(self, pull: port.PullNotice) -> None:
    p = pull.fragment
    with self._changed:
      self._changed.wait_for(
        lambda: p in self._copies or self._ending or self._over.is_set(), 5.0
      )
      copy = self._copies.get(p)
    if copy is None:
      return
    delta = {path: copy.base[path] - copy.arrays[path] for path in copy.base}
    data = codec.encode(
      self.spoil.delta(delta),
      self._run.layout.fragment(p),
      self._run.up_format,
    )
    header = self.spoil.header(
      port.ReplyHeader(
        session=self.welcomes[-1].session,
        fragment=p,
        round=pull.round,
        attempt=pull.attempt,
        base=copy.version,
        counts=copy.counts,
        lr_sum=float(self.rate) * copy.counts.steps,
        positions=(copy.position,),
        format=self._run.up_format,
        num_bytes=len(data),
      )
    )
    for _ in range(self.spoil.times):
      self.results.append((header, self._push(header, data)))

  def _push(self, header: port.ReplyHeader, data: bytearray) -> object:
    try:
      return self._retry(
        lambda: self.sync.push(
          header, codec.chunks(data, self._run.chunk_bytes)
        )
      )
    except ServiceError as error:
      return error.with_traceback(None)  # It would keep the data.

  # --- a step boundary -----------------------------------------------------------

  def _adopt(self) -> None:
    with self._changed:
      fresh, self._fresh = self._fresh, {}
    for p, (version, arrays, exact) in sorted(fresh.items()):
      known = self.versions.get(p)
      is_older = known is not None and version.epoch < known.epoch
      if (version == known and not exact) or is_older:
        continue
      alpha = 0.0 if exact or known is None else self._run.alpha
      for path, array in arrays.items():
        kept = self.theta.get(path, array)
        self.theta[path] = np.float32(alpha) * kept + (
          np.float32(1 - alpha) * array
        )
      counts = self._counts.get(p, events.Counts())
      with self._changed:
        self._bases[p] = arrays
        self.versions[p] = version
        self._counts[p] = events.Counts()
        self._copies.pop(p, None)
      self._say(
        events.Applied(
          fragment=p,
          version=version,
          step=self.step,
          counts=counts,
          exact=exact,
        )
      )

  def _take_step(self) -> None:
    for path, array in self.theta.items():
      self.theta[path] = array - self.rate * (array - self.target)
    self.step += 1
    self._position = self._position._replace(batch=self._position.batch + 1)
    for p, counts in self._counts.items():
      self._counts[p] = events.Counts(
        counts.steps + 1, counts.tokens + self.tokens
      )
    with self._changed:
      self._copies = {
        p: _Copy(
          {path: self.theta[path] for path in self._bases[p]},
          self._bases[p],
          self.versions[p],
          self._counts[p],
          self._position,
        )
        for p in self._bases
      }
      self._changed.notify_all()

  def _report(self, exhausted: bool) -> events.Reported:
    distance = max(
      float(np.max(np.abs(array - self.target)))
      for array in self.theta.values()
    )
    return events.Reported(
      step=self.step,
      counts=tuple(self._counts[p] for p in sorted(self._counts)),
      positions=(self._position,),
      exhausted=exhausted,
      metrics=(("distance", distance),),
    )

  def _say(self, message: port.Upward) -> None:
    if self._control:
      self._control.send(message)

  def _wake(self) -> None:
    with self._changed:
      self._changed.notify_all()

  def _retry(self, call: Callable):
    """Calls until the syncer answers."""
    deadline = time.monotonic() + 300  # A machine may be busy.
    while True:
      try:
        return call()
      except ServiceError as error:
        over = self._over.is_set() or time.monotonic() > deadline
        if over or not error.is_worth_retrying:
          raise
      self._over.wait(0.1)
