"""What a learner's loop and the threads of its link exchange, under one lock."""

import threading

from ddiloco_jax.protocol import events
from ddiloco_jax.wire import port


class Exchange:
  """Values only: whoever reads or writes them holds `changed`.

  Attributes:
    changed: The lock; notified when a thread may have to look again.
    nonce: Names this process to the syncer.
    fences: It is not the first one that this link speaks for.
    run: What the syncer told of it last.
    resumes: Nonce of the process whose part of a snapshot this one goes on
      from; "" if it does not.
    welcome, control, stamp: Of the newest control stream.
    reads: The shards that the loop reads.
    reading: Which data to read, where that has changed and the loop has not
      taken it yet.
    bases: Per fragment, the version that the loop trains from.
    adoptions: Per fragment, the loop's last ones since the syncer admitted it,
      oldest first.
    reported: The loop's last report.
    recovered: Where it has its inner state from.
    copies, earlier: Of the last boundary and of the one before.
    pulls: That were not answered yet.
    last_slot: The fragment that was due last, as far as is known.
    wanted: What was published and is to be fetched.
    newest: What was fetched last.
    ready: What was fetched and not taken by the loop yet.
    marker: A cut whose marker was not answered yet.
    ending, finished: What the syncer said of the end.
    error: What ended a thread, and with it the link.
    left: The loop has said goodbye.
  """

  def __init__(self, nonce: str):
    self.changed = threading.Condition()
    self.nonce = nonce
    self.fences = False
    self.run: port.RunSpec | None = None
    self.resumes = ""
    self.welcome: port.Welcomed | None = None
    self.control: port.Control | None = None
    self.stamp = port.Stamp()
    self.reads: tuple[int, ...] = ()
    self.reading: port.Reading | None = None
    self.bases: dict[int, events.Version] = {}
    self.adoptions: dict[int, tuple[events.Applied, ...]] = {}
    self.reported: events.Reported | None = None
    self.recovered: events.Recovered | None = None
    self.copies: dict[int, port.Copy] = {}
    self.earlier: dict[int, port.Copy] = {}
    self.pulls: dict[int, port.PullNotice] = {}
    self.last_slot = -1
    self.wanted: dict[int, port.PublishedNotice] = {}
    self.newest: dict[int, events.Version] = {}
    self.ready: dict[int, port.Publication] = {}
    self.marker: port.MarkerNotice | None = None
    self.ending: str | None = None
    self.finished: port.FinishedNotice | None = None
    self.error: BaseException | None = None
    self.left = False
    self._num_news = 0
    self._num_seen = 0

  def note_adoption(self, applied: events.Applied) -> None:
    p = applied.fragment
    mine = (*self.adoptions.get(p, ()), applied)
    self.bases[p] = applied.version
    self.adoptions[p] = mine[-events.MAX_ADOPTIONS :]

  def all_adoptions(self) -> tuple[events.Applied, ...]:
    return tuple(a for mine in self.adoptions.values() for a in mine)

  def is_over(self) -> bool:
    """Whether the link's threads are to end."""
    return bool(self.left or self.error or self.finished)

  def has_all(self, num_fragments: int) -> bool:
    """Whether it has joined, and has every fragment to train from."""
    have = self.ready.keys() | self.bases.keys()
    return self.welcome is not None and len(have) == num_fragments

  def is_anew(self) -> bool:
    """Whether the loop's counts are of a process that is over."""
    return self.reading is not None and self.reading.anew

  def tell_loop(self) -> None:
    """There is something that the loop would look at."""
    self._num_news += 1
    self.changed.notify_all()

  def wait_for_news(self, timeout_s: float) -> bool:
    """Blocks the loop until there is; False on timeout."""
    told = self.changed.wait_for(
      lambda: self._num_news != self._num_seen, timeout_s
    )
    self._num_seen = self._num_news
    return told

  def say(self, message: port.Upward) -> None:
    """Queues a message on the newest control stream, if there is one."""
    if self.control:
      self.control.send(message)

  def is_known(self, p: int, version: events.Version) -> bool:
    """Whether a version, or a later one, was fetched."""
    newest = self.newest.get(p)
    return newest is not None and (newest == version or newest.n > version.n)

  def is_rolled_back(self, p: int, version: events.Version) -> bool:
    """Whether the newest start of the syncer has lost a version."""
    welcome = self.welcome
    assert welcome
    return version.epoch < welcome.epoch and version.n > welcome.clocks[p].n0
