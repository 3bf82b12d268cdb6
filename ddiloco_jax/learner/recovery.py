"""How a process that joins a run under way gets its inner optimizer's state.

From a healthy peer, at a boundary at which it holds the welcome's clock: from
its own address, else by way of the syncer; else from its own checkpoint; else
it begins fresh, and warms up again. Theta comes from the syncer in any case: a
peer's own parameters hold steps that the peer will report, and which this
learner's counts, that start at 0, must not cover. (arXiv 2604.21428, App. E.)
"""

import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ddiloco_jax.learner.peer import Desk
from ddiloco_jax.learner.seams import Trainer
from ddiloco_jax.protocol import events
from ddiloco_jax.wire import fields, port, transfer
from ddiloco_jax.wire import state as states
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError

_log = logging.getLogger(__name__)
_LOOK_S = 0.05
_NUM_AGAIN = 2  # Where more than a cycle has passed over a transfer.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
  """What a joining learner may ask of its peers.

  Attributes:
    patience_s: How long no healthy peer may give a byte, over all that are
      asked, and, beyond their state's bytes at 1 MB/s, how long they may take
      in all; 0: ask none.
  """

  patience_s: float = 30.0


# (request, HOST:PORT of the donor, or "": by way of the syncer) -> a call.
OpenState = Callable[[pb.FetchStateRequest, str], Any]


class Recovery:
  """Recovers once after the start, and gives to others ever after.

  Args:
    open_state: Opens a transfer; see `Client.open_state`.
    desk: Where peers ask this learner; None if it serves nobody.
    cfg: See RecoveryConfig.

  Attributes:
    own: What this process has without its peers: "checkpoint", "fresh", or its
      part of the "snapshot" that the run was restored from.
  """

  def __init__(
    self,
    open_state: OpenState,
    desk: Desk | None = None,
    cfg: RecoveryConfig | None = None,
  ):
    self._open_state = open_state
    self._desk = desk
    self._cfg = cfg or RecoveryConfig()
    self.own = "fresh"

  def recover(
    self, link: port.Port, trainer: Trainer, should_stop: Callable[[], bool]
  ) -> None:
    """Puts the best inner state that can be had into the trainer.

    Nothing is asked, or told, in a run without a merge: all begin alike.
    """
    if self._desk:
      self._desk.open(link.run.run_id, link.run.layout.num_fragments)
    welcome = link.welcome
    if self.own == "snapshot" and welcome.reconnect:
      told = events.Recovered(source=self.own, reason="it goes on from there")
      _log.info("inner state: %s: %s", told.source, told.reason)
      link.recovered(told)
      return
    if not any(clock.version.n for clock in welcome.clocks):
      return
    attempt = _Attempt(
      self._open_state, link, trainer.inner_shapes(), self._cfg, should_stop
    )
    state, source = attempt.peers_state()
    if state is not None:
      trainer.put_inner(state.arrays)
    donor = state.donor if state else ""
    reason = "; ".join(attempt.said)[: fields.MAX_TEXT]
    told = events.Recovered(
      source=source or self.own, donor=donor, reason=reason
    )
    _log.info("inner state: %s %s: %s", told.source, donor, reason)
    link.recovered(told)

  def give(
    self, step: int, clock: Sequence[events.Version], trainer: Trainer
  ) -> None:
    """At a boundary: answers a peer that asks, if one does."""
    if self._desk:
      self._desk.answer(step, clock, trainer.take_inner)


class _Attempt:
  """Asks the peers for one process; `said` tells what came of it."""

  def __init__(
    self,
    open_state: OpenState,
    link: port.Port,
    shapes: states.Shapes,
    cfg: RecoveryConfig,
    should_stop: Callable[[], bool],
  ):
    self._open_state = open_state
    self._link = link
    self._shapes = shapes
    self._patience_s = cfg.patience_s
    self._should_stop = should_stop
    self.said: list[str] = []

  def peers_state(self) -> tuple[states.State | None, str]:
    """A state, and whether from a "peer" or by "relay"; None: from nobody."""
    donor = self._link.welcome.donor
    if not self._patience_s or not self._shapes or donor is None:
      self.said.append(
        "no peer was asked" if donor else "no healthy peer serves its state"
      )
      return None, ""
    best: tuple[states.State | None, str] = None, ""
    for _ in range(1 + _NUM_AGAIN):
      t = self._link.stamp().t
      found = self._ask(donor)
      best = found if found[0] else best
      if not found[0] or self._link.stamp().t - t <= self._link.run.cycle_steps:
        break
      self.said.append("more than a cycle passed meanwhile")
    return best

  def _ask(self, donor: events.Donor) -> tuple[states.State | None, str]:
    """Three ways, each with a share of the patience: the donor, if its address
    was told, the donor by way of the syncer, and whom the syncer would ask
    instead."""
    ways = [("relay", "", ()), ("relay", "", (donor.learner,))]
    if donor.address:
      ways.insert(0, ("peer", donor.address, ()))
    # One that answers does so at its next boundary.
    share_s = max(self._patience_s / len(ways), 3 * self._link.stamp().step_s)
    is_other = False
    for source, address, but_not in ways:
      if self._is_unwanted():
        break
      if is_other and not but_not:
        continue  # So it is, whichever way it comes.
      try:
        state = self._fetch(
          self._request(donor, address, but_not), address, share_s
        )
      except states.OtherState as error:
        self.said.append(str(error))
        is_other = True
        continue
      except ServiceError as error:
        self.said.append(f"{source}: {error.text}")
        continue
      self.said.append(f"at its step {state.step}")
      return state, source
    return None, ""

  def _fetch(
    self, request: pb.FetchStateRequest, address: str, patience_s: float
  ) -> states.State:
    """Asks until there is an answer; a busy donor is asked again.

    Raises:
      OtherState, ServiceError: why there is no state.
    """
    deadline = time.monotonic() + patience_s
    while True:
      transfer_ = _Transfer(self._open_state, request, address, self._shapes)
      try:
        return transfer_.wait(patience_s, self._is_unwanted)
      except ServiceError as error:
        busy = error.code == "RESOURCE_EXHAUSTED"
        if not busy or self._is_unwanted() or time.monotonic() > deadline:
          raise
      time.sleep(random.uniform(0.1, 0.4))

  def _request(
    self, donor: events.Donor, address: str, but_not: Sequence[str]
  ) -> pb.FetchStateRequest:
    welcome = self._link.welcome
    session = welcome.session
    return pb.FetchStateRequest(
      learner_id=session.learner,
      incarnation=session.incarnation,
      # Whoever has it speaks for this learner: no peer is told.
      session_secret="" if address else session.secret,
      run_id=welcome.run_id,
      donor_id=donor.learner,
      clock=[fields.version_to_pb(clock.version) for clock in welcome.clocks],
      but_not=but_not,
    )

  def _is_unwanted(self) -> bool:
    return bool(self._link.ending()) or self._should_stop()


class _Transfer(threading.Thread):
  """One transfer on a thread of its own, so that it can be given up."""

  def __init__(
    self,
    open_state: OpenState,
    request: pb.FetchStateRequest,
    address: str,
    shapes: states.Shapes,
  ):
    super().__init__(name="recovery", daemon=True)
    self._open_state = open_state
    self._request = request
    self._address = address
    self._shapes = shapes
    # By way of the syncer it may be another's: it is asked who serves now.
    self._asked = states.Asked(
      clock=states.clock_from_pb(request, len(request.clock)),
      donor=request.donor_id if address else "",
      but_not=(request.learner_id, *request.but_not),
    )
    self._call: Any = None
    self._state: states.State | None = None
    self._error: BaseException | None = None
    self._moved_at = time.monotonic()

  def wait(
    self, patience_s: float, is_unwanted: Callable[[], bool]
  ) -> states.State:
    """The state; gives up after a silence, or when nobody wants it, or once it
    has taken longer in all than the patience and its bytes at the slowest rate.

    Raises:
      OtherState, ServiceError: why there is none.
    """
    num_bytes = states.num_bytes(self._shapes)
    longest_s = patience_s + num_bytes / transfer.SLOWEST_BYTES_PER_S
    began_at = self._moved_at = time.monotonic()
    self.start()
    try:
      while self.is_alive():
        self.join(_LOOK_S)
        if is_unwanted():
          raise ServiceError("UNAVAILABLE", "this learner is told to stop")
        if time.monotonic() - self._moved_at > patience_s:
          raise ServiceError(
            "UNAVAILABLE", f"no byte came for {patience_s:g} s"
          )
        if time.monotonic() - began_at > longest_s:
          raise ServiceError(
            "UNAVAILABLE", f"its state was not whole after {longest_s:.3g} s"
          )
    finally:
      if self.is_alive() and self._call:
        self._call.cancel()
    if self._error:
      raise self._error
    assert self._state
    return self._state

  def run(self) -> None:
    try:
      self._call = self._open_state(self._request, self._address)
      self._state = states.receive(
        self._parts(), self._shapes, self._asked, self._touch
      )
    except BaseException as error:
      self._error = error
    finally:
      if self._call:
        self._call.cancel()

  def _parts(self) -> Iterator[transfer.Part]:
    yield from self._call

  def _touch(self) -> None:
    self._moved_at = time.monotonic()
