"""A link's transfers: answers to pulls go up, publications come down."""

import logging
from collections.abc import Callable

from ddiloco_jax.algorithm import delta as deltas
from ddiloco_jax.learner.exchange import Exchange
from ddiloco_jax.learner.patience import Patience
from ddiloco_jax.protocol.events import Outcome
from ddiloco_jax.wire import codec, port
from ddiloco_jax.wire.status import ServiceError

_log = logging.getLogger(__name__)


class Bulk:
  """Each direction runs on a thread of its own.

  Args:
    synchronizer: To push to and to fetch from.
    learner: This learner's id, for the log.
    run: Of the syncer.
    shared: Where copies come from and publications go.
    patience: Its pause, between two attempts.
  """

  def __init__(
    self,
    synchronizer: port.Synchronizer,
    learner: str,
    run: port.RunSpec,
    shared: Exchange,
    patience: Patience,
  ):
    self._sync = synchronizer
    self._learner = learner
    self._run = run
    self._shared = shared
    self._pause: Callable[[], None] = patience.pause

  def push(self) -> None:
    """Answers pulls, one at a time, from the newest copies."""
    while (answer := self._next_answer()) is not None:
      pull, copy, session = answer
      leaves = self._run.layout.fragment(pull.fragment)
      delta = deltas.delta(copy.base, copy.arrays)
      data = codec.encode(delta, leaves, self._run.up_format)
      header = port.ReplyHeader(
        session=session,
        fragment=pull.fragment,
        round=pull.round,
        attempt=pull.attempt,
        base=copy.base_version,
        counts=copy.counts,
        lr_sum=copy.lr_sum,
        positions=copy.positions,
        format=self._run.up_format,
        num_bytes=len(data),
      )
      self._deliver(header, data)

  def _next_answer(
    self,
  ) -> tuple[port.PullNotice, port.Copy, port.Session] | None:
    shared = self._shared

    def copy_of(p: int) -> port.Copy | None:
      copy = shared.copies.get(p)
      # The flush is to have the very last steps.
      earlier = None if shared.ending else shared.earlier.get(p)
      if copy is None or (earlier and not _is_ready(copy)):
        return earlier
      return copy

    with shared.changed:
      while not shared.is_over():
        for p in shared.pulls:
          if copy := copy_of(p):
            assert shared.welcome
            return shared.pulls.pop(p), copy, shared.welcome.session
        shared.changed.wait()
    return None

  def _deliver(self, header: port.ReplyHeader, data: bytearray) -> None:
    """Pushes one reply; a retry is safe, since a reply is named once."""
    shared = self._shared
    while not shared.is_over():
      try:
        chunks = codec.chunks(data, self._run.chunk_bytes)
        result = self._sync.push(header, chunks)
      except ServiceError as error:
        welcome = shared.welcome
        renewed = welcome and welcome.session != header.session
        if renewed or not error.is_worth_retrying:
          _log.warning("reply of %s is lost: %s", self._learner, error)
          return
        self._pause()
        continue
      if result.outcome not in (Outcome.ACCEPTED, Outcome.CARRIED):
        _log.info(
          "reply of %s: %s: %s", self._learner, result.outcome, result.reason
        )
      return

  def fetch(self) -> None:
    """Fetches and decodes the newest version of what was published.

    Raises:
      ServiceError: what neither another attempt nor another session changes.
    """
    while (wanted := self._next_wanted()) is not None:
      notice, session = wanted
      p = notice.fragment
      try:
        header, data = self._sync.fetch(session, p, 0, notice.exact)
      except ServiceError as error:
        if not (error.is_worth_retrying or error.is_of_session):
          raise
        with self._shared.changed:
          self._shared.wanted.setdefault(p, notice)
        self._pause()
        continue
      leaves = self._run.layout.fragment(p)
      publication = port.Publication(
        fragment=p,
        version=header.version,
        arrays=codec.decode(data, leaves, header.format),
        exact=notice.exact,
      )
      with self._shared.changed:
        if self._shared.is_rolled_back(p, header.version):
          continue  # Since it was asked for; the newest is wanted already.
        self._shared.newest[p] = header.version
        self._shared.ready[p] = publication
        self._shared.tell_loop()

  def _next_wanted(self) -> tuple[port.PublishedNotice, port.Session] | None:
    shared = self._shared
    with shared.changed:
      while True:
        shared.changed.wait_for(lambda: shared.is_over() or shared.wanted)
        if shared.is_over():
          return None
        assert shared.welcome
        p = next(iter(shared.wanted))
        notice = shared.wanted.pop(p)
        if notice.exact or not shared.is_known(p, notice.version):
          return notice, shared.welcome.session


def _is_ready(copy: port.Copy) -> bool:
  """Whether reading a copy would not wait for a device."""
  return all(
    array.is_ready()
    for array in copy.arrays.values()
    if hasattr(array, "is_ready")
  )
