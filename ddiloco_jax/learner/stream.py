"""A link's control stream: joins, hears, and joins again when it breaks.

What the loop said while nobody listened is said again. (arXiv 2604.21428,
App. E.)
"""

import dataclasses
import logging
import random
import time

from ddiloco_jax.learner.exchange import Exchange
from ddiloco_jax.learner.patience import LinkConfig, Patience
from ddiloco_jax.protocol import events
from ddiloco_jax.wire import port
from ddiloco_jax.wire.status import ServiceError

_log = logging.getLogger(__name__)


class Stream:
  """Runs on a thread of its own.

  Args:
    synchronizer: To join.
    learner: This learner's id.
    cfg: See LinkConfig.
    shared: Where notices go.
    patience: For a syncer that is not there.
  """

  def __init__(
    self,
    synchronizer: port.Synchronizer,
    learner: str,
    cfg: LinkConfig,
    shared: Exchange,
    patience: Patience,
  ):
    self._sync = synchronizer
    self._learner = learner
    self._cfg = cfg
    self._shared = shared
    self._patience = patience

  def hear(self) -> None:
    """Takes notices until the link is over.

    Raises:
      SyncerLost: nobody answered for too long.
      ServiceError: why this process may not be in the run.
    """
    timeout_s = self._cfg.connect_timeout_s
    while not self._shared.is_over():
      control = self._patience.call(self._join, timeout_s, "Join")
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
      if not self._shared.is_over():
        time.sleep(random.uniform(0.02, 0.1))

  def beat(self) -> None:
    """Shows life while the loop compiles, restores or waits."""
    shared = self._shared
    every_s = self._run.lease_s / 5
    with shared.changed:
      while not shared.is_over():
        shared.say(events.Heard())
        shared.changed.wait_for(shared.is_over, every_s)

  @property
  def _run(self) -> port.RunSpec:
    assert self._shared.run, "a link asks for its run before it joins"
    return self._shared.run

  def _join(self) -> port.Control | None:
    shared = self._shared
    if shared.welcome:
      self._look_at_run()
    layout = self._run.layout
    num, digest = layout.num_fragments, layout.digest()
    with shared.changed:  # All of one moment: the loop adopts and reports.
      if shared.left:
        return None
      known = len(shared.bases) == num
      bases = [shared.bases[p] for p in range(num)] if known else []
      hello = port.Hello(
        learner=self._learner,
        nonce=shared.nonce,
        layout_digest=digest,
        run_id=self._run.run_id,
        takeover=self._cfg.takeover or shared.fences,
        bases=tuple(bases),
        state_address=self._cfg.state_address,
        takes_shards=True,
        resumes=shared.resumes,
        reads=shared.reads,
        returned=shared.reported.returned if shared.reported else (),
        adoptions=shared.all_adoptions(),
      )
    control = self._sync.join(hello)
    stamp, welcome = next(control.notices())
    assert isinstance(welcome, port.Welcomed), welcome
    with shared.changed:
      if shared.left:
        control.close()
        return None
      if shared.nonce != hello.nonce:  # It has started over meanwhile.
        control.close()
        return control
      before, shared.welcome = shared.welcome, welcome
      if not (welcome.reconnect and before and before.epoch == welcome.epoch):
        shared.pulls.clear()
      shared.control, shared.stamp = control, stamp
      if before and before.epoch != welcome.epoch:
        shared.marker = None  # Its cut ended with the epoch.
        shared.ending = None  # If the run still ends, it is said again.
        shared.tell_loop()
      if not (before or shared.resumes):
        shared.reads = tuple(shard for shard, _ in welcome.positions)
      elif not welcome.reconnect:
        self._begin_anew(welcome)
      self._ask_for_news(welcome)
      self._say_again(hello, welcome)
      shared.changed.notify_all()
    return control

  def _look_at_run(self) -> None:
    """A restart of the syncer may have changed what may change in a run."""
    run = self._sync.get_run()
    if run.run_id == self._run.run_id:  # Another run refuses this learner.
      self._shared.run = run

  def _begin_anew(self, welcome: port.Welcomed) -> None:
    """For the syncer this is a new process, maybe with other data shards."""
    shared = self._shared
    shared.copies, shared.earlier, shared.reported = {}, {}, None
    shared.reading = port.Reading(positions=welcome.positions, anew=True)
    shared.reads = tuple(shard for shard, _ in welcome.positions)
    shared.tell_loop()

  def _ask_for_news(self, welcome: port.Welcomed) -> None:
    """Wants what was published, or rolled back, while nobody listened."""
    shared = self._shared
    for p, clock in enumerate(welcome.clocks):
      newest = shared.newest.get(p)
      if newest and shared.is_rolled_back(p, newest):
        del shared.newest[p]
        shared.ready.pop(p, None)
      if not shared.is_known(p, clock.version):
        shared.wanted[p] = port.PublishedNotice(
          fragment=p,
          version=clock.version,
          outcome=events.Outcome.NOT_ASKED,
        )

  def _say_again(self, hello: port.Hello, welcome: port.Welcomed) -> None:
    """What the loop said while no stream, or an older one, listened."""
    shared = self._shared
    told = hello.adoptions if welcome.reconnect or hello.bases else ()
    untold = [a for a in shared.all_adoptions() if a not in told]
    if not welcome.reconnect:  # Their counts are of a process that is over.
      untold = [dataclasses.replace(a, counts=events.ZERO) for a in untold]
      shared.adoptions.clear()
      for applied in untold:
        shared.note_adoption(applied)
    for applied in untold:
      shared.say(applied)
    if shared.recovered:
      shared.say(shared.recovered)
    if shared.reported:
      shared.say(shared.reported)

  def _take(self, stamp: port.Stamp, notice: port.Notice) -> None:
    shared = self._shared
    with shared.changed:
      shared.stamp = stamp
      match notice:
        case port.PullNotice(fragment=p):
          shared.pulls[p] = notice
          shared.last_slot = p
        case port.PublishedNotice(fragment=p):
          shared.wanted[p] = notice
          num = self._run.layout.num_fragments
          if (p - shared.last_slot) % num <= num // 2:
            shared.last_slot = p  # Others were pulled, and are ahead.
        case port.GivenUpNotice(fragment=p, round=r, attempt=attempt):
          pull = shared.pulls.get(p)
          if pull and (pull.round, pull.attempt) == (r, attempt):
            del shared.pulls[p]
        case port.ShardsNotice(positions=positions):
          anew = shared.is_anew()
          shared.reading = port.Reading(positions=positions, anew=anew)
        case port.MarkerNotice():
          shared.marker = notice
        case port.EndingNotice(reason=reason):
          shared.ending = reason
        case port.FinishedNotice():
          shared.finished = notice
      shared.tell_loop()
