"""The two seams of a run, as types: Port (loop <-> link), Synchronizer (link <-> syncer).

The training loop talks to a `Port` and never waits for the network. A link
implements the Port over a `Synchronizer`: the Syncer object itself in process,
or a gRPC client that mirrors it. (arXiv 2604.21428, Sec. 3.)
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from ddiloco_jax.algorithm.fragments import Fragment, Layout
from ddiloco_jax.protocol import events

PROTOCOL_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
  """What a learner must know and may not choose (message Run).

  Attributes:
    origin_run_id, origin_snapshot: The snapshot that it was restored from.
  """

  run_id: str
  epoch: int
  layout: Layout
  cycle_steps: int
  max_open_rounds: int
  quorum: int
  alpha: float
  up_format: str
  down_format: str
  chunk_bytes: int
  lease_s: float
  wait_for_publication: bool = False
  adoption_delay_steps: int = 0
  max_ahead: int = 0
  num_shards: int = 1
  num_syncer_steps: int = 0
  settings_json: str = "{}"
  origin_run_id: str = ""
  origin_snapshot: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
  """Who speaks: goes with every push and fetch (wire, rule 6)."""

  learner: str
  incarnation: int
  secret: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
  """The syncer's step t, and its estimate of a learner step (0: none yet)."""

  t: int = 0
  step_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Welcomed:
  """What a joined learner is told first (message Welcome)."""

  session: Session
  run_id: str
  epoch: int
  clocks: tuple[events.FragmentClock, ...]
  positions: tuple[events.Position, ...]
  reconnect: bool
  donor: events.Donor | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PullNotice:
  fragment: int
  round: int
  attempt: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishedNotice:
  fragment: int
  version: events.Version
  outcome: events.Outcome
  reason: str = ""
  round: int = -1
  attempt: int = -1
  exact: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpNotice:
  fragment: int
  round: int
  attempt: int
  reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndingNotice:
  reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishedNotice:
  reason: str
  exit_code: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardsNotice:
  """All data shards to read from the next step boundary on."""

  positions: tuple[events.Position, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MarkerNotice:
  """Save at the boundary at which these versions, one a fragment, are held."""

  snapshot: int
  clock: tuple[events.Version, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatNotice:
  """Nothing to say but a stamp."""


Notice = (
  Welcomed
  | PullNotice
  | PublishedNotice
  | GivenUpNotice
  | EndingNotice
  | FinishedNotice
  | ShardsNotice
  | MarkerNotice
  | HeartbeatNotice
)
Upward = (
  events.Reported
  | events.Applied
  | events.Recovered
  | events.MarkerDone
  | events.Left
  | events.Heard
)  # What a joined learner may say on its control stream.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
  """First word of a control stream (message Hello)."""

  learner: str
  nonce: str
  layout_digest: str
  protocol_version: int = PROTOCOL_VERSION
  run_id: str = ""
  takeover: bool = False
  bases: tuple[events.Version, ...] = ()
  max_replies: int = 1
  state_address: str = ""
  takes_shards: bool = False
  resumes: str = ""
  reads: tuple[int, ...] = ()
  returned: tuple[events.Position, ...] = ()
  adoptions: tuple[events.Applied, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHeader:
  """First part of a push (message ReplyHeader)."""

  session: Session
  fragment: int
  round: int
  attempt: int
  base: events.Version
  counts: events.Counts
  lr_sum: float
  positions: tuple[events.Position, ...]
  format: str
  num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
  """The answer to a push (message PushOutcome)."""

  outcome: events.Outcome
  reason: str = ""
  first: events.Outcome | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FragmentHeader:
  """First part of a fetch (message FragmentHeader).

  Attributes:
    crc32: Of the bytes, where the syncer keeps it; else computed when served.
  """

  fragment: int
  version: events.Version
  format: str
  num_bytes: int
  crc32: int | None = None


class Control(Protocol):
  """One learner's control stream, as the learner holds it."""

  def send(self, message: Upward) -> None:
    """Queues a message; never waits for the network."""

  def notices(self) -> Iterator[tuple[Stamp, Notice]]:
    """Blocks for the next notice; ends when the stream does.

    Raises:
      ddiloco_jax.wire.status.ServiceError: what ended the stream, if not well.
    """
    ...

  def close(self) -> None:
    """Ends the stream without a goodbye; after one, or twice, does nothing."""


class Synchronizer(Protocol):
  """The service, as a learner calls it: the Syncer object or a gRPC client."""

  def get_run(self) -> RunSpec: ...

  def join(self, hello: Hello) -> Control:
    """Opens a control stream; the first notice is Welcomed."""
    ...

  def push(
    self, header: ReplyHeader, chunks: Iterable[bytes | memoryview]
  ) -> PushResult:
    """Sends one reply; chunks are at most chunk_bytes and total num_bytes."""
    ...

  def fetch(
    self, session: Session, fragment: int, n: int, exact: bool
  ) -> tuple[FragmentHeader, bytes | bytearray | memoryview]:
    """A published version whole, its checksum verified; n == 0: newest."""
    ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
  """One boundary's copy of a fragment, from which a pull is answered.

  Attributes:
    arrays: The fragment's parameters; anything np.asarray takes. The link
      reads them on its own thread; the loop never writes them again.
    base: The bytes received, decoded to float32; shared, read only.
  """

  arrays: Fragment
  base: Fragment
  base_version: events.Version
  counts: events.Counts
  lr_sum: float
  positions: tuple[events.Position, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
  """A fetched, decoded version, ready for the next step boundary.

  Attributes:
    arrays: float32, owned by the receiver: never reused by the link.
  """

  fragment: int
  version: events.Version
  arrays: dict[str, np.ndarray]
  exact: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
  """All data shards to read from now on, and from where.

  Attributes:
    anew: For the syncer this is another process: the steps that were not
      merged are lost, and count no more. Else shards that are being read go on
      where they are.
  """

  positions: tuple[events.Position, ...]
  anew: bool


class Port(Protocol):
  """The syncer, as the training loop sees it. No method waits for the network
  but `start` and `wait`."""

  @property
  def run(self) -> RunSpec: ...

  @property
  def welcome(self) -> Welcomed:
    """Of the newest control stream; another one after a reconnect."""
    ...

  @property
  def nonce(self) -> str:
    """Names this process to the syncer."""
    ...

  def resume(
    self, nonce: str, bases: Sequence[events.Version], report: events.Reported
  ) -> None:
    """Before `start`: this process goes on from another one's saved state.

    Args:
      nonce: Of that one.
      bases: That it trained from, one a fragment.
      report: Of its last boundary.
    """
    ...

  def start(self) -> Welcomed:
    """Joins, and fetches every fragment; `published` then has all of them."""
    ...

  def reading(self) -> Reading | None:
    """What to read from this step boundary on, where that has changed.

    Until it was taken, nothing that is offered or reported is passed on where
    it is `anew`.
    """
    ...

  def published(self) -> Sequence[Publication]:
    """What was fetched since the last call, newest of each fragment only.

    Raises:
      Exception: whatever ended the link's threads for good.
    """
    ...

  def adopted(
    self,
    publication: Publication,
    step: int,
    counts: events.Counts,
  ) -> None:
    """Says that a publication is in place; drops the fragment's copy.

    Args:
      publication: As `published` gave it.
      step: This learner's, at the boundary.
      counts: Of the fragment, that the adoption reset.
    """

  def due_next(self, step_s: float) -> Sequence[int]:
    """The fragments to copy at this boundary, soonest first.

    Args:
      step_s: The learner's own step time, seconds.
    """
    ...

  def offer(self, copies: dict[int, Copy]) -> None:
    """Replaces the copies from which pulls are answered."""

  def report(self, report: events.Reported) -> None:
    """Queues a report; an unsent older one is replaced."""

  def recovered(self, recovered: events.Recovered) -> None:
    """Says where this process has its inner optimizer's state from."""

  def stamp(self) -> Stamp:
    """The newest stamp seen."""
    ...

  def marker(self) -> MarkerNotice | None:
    """A cut that this learner is to save its part of, until it has answered.

    Asked after `published`: a version that it gives and that is newer than the
    cut cannot come without the marker.
    """
    ...

  def marked(self, done: events.MarkerDone) -> None:
    """Answers the marker."""

  def ending(self) -> str | None:
    """Why the run ends, once it does: stop stepping, and whatever else waits.

    Raises:
      Exception: whatever ended the link's threads for good.
    """
    ...

  def finished(self) -> FinishedNotice | None:
    """The syncer's last word, once it was said."""
    ...

  def start_over(self, reason: str) -> None:
    """Leaves, and joins again as another process, with the bases it has.

    What to read then comes as a reading that is anew.
    """

  def wait(self, timeout_s: float) -> bool:
    """Blocks until something may have changed; False on timeout."""
    ...

  def leave(self, reason: str) -> None:
    """Says goodbye and ends the link's threads."""
