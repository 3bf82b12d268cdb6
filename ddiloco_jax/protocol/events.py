"""What the state machine consumes (events) and what it decides (effects).

Everything here is a receipt: numbers, names and times, never a tensor. Times
are seconds since the run began, on the syncer's monotonic clock. A learner
leaves `time`, `learner` and `incarnation` of an event at their defaults: the
syncer stamps them from its clock and from the session that the event came in
on. (arXiv 2604.21428, Sec. 3.)
"""

import dataclasses
import enum
from typing import Any, NamedTuple


class Version(NamedTuple):
  """A version of one fragment: `n` counts its merges over all epochs."""

  epoch: int
  n: int


class Counts(NamedTuple):
  """Steps and loss tokens of one fragment since its last adoption."""

  steps: int = 0
  tokens: int = 0


ZERO = Counts()


class Position(NamedTuple):
  """How far a data shard has been read: the next batch index."""

  shard: int
  batch: int


class ReplyKey(NamedTuple):
  """Names one reply, exactly once (spec: wire, rule 5)."""

  learner: str
  incarnation: int
  fragment: int
  round: int
  attempt: int


# Of a fragment, that are named to a syncer that may have missed them: while one
# is away, the version that was held, the one that was ready, an exact one, and
# what a rollback asks for.
MAX_ADOPTIONS = 4


class Adoption(NamedTuple):
  """A process adopted a version at its `step`; `counts` are what it reset."""

  fragment: int
  version: Version
  step: int
  counts: Counts


class Outcome(enum.StrEnum):
  """What became of a reply."""

  INCLUDED = "included"  # Merged; told in a publication.
  ACCEPTED = "accepted"  # Will be merged in the round it answers.
  CARRIED = "carried"  # Will be merged in a later round of its fragment.
  DUPLICATE = "duplicate"  # Seen before; the first outcome stands.
  LATE = "late"  # Its round is closed.
  REFUSED = "refused"  # Not merged; the reason says why.
  NOT_ASKED = "not_asked"  # Receiver of a publication had no reply in it.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
  time: float = 0.0  # Seconds since the run began.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LearnerEvent(Event):
  learner: str = ""
  incarnation: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Event):
  """A learner said hello on a control stream.

  Attributes:
    learner: Its id, chosen by whoever launched it.
    nonce: Random name of its process: the same nonce is a reconnect.
    takeover: Fence a live process of the same id.
    bases: Base version per fragment that the process trains from; empty for a
      process that has none yet.
    max_replies: Replies it may have under way at once.
    state_address: Where it serves its state to peers; "" if it does not.
    takes_shards: It obeys `Shards`; others are never lent one.
    resumes: Nonce of the process whose part of a snapshot it goes on from.
    reads: The data shards that a process reads that reconnects.
    returned: Those that it has given up; see `Reported`.
    adoptions: Its last ones of each fragment since it was admitted, oldest
      first: what was said of them may have been lost with a stream.
  """

  learner: str
  nonce: str
  takeover: bool = False
  bases: tuple[Version, ...] = ()
  max_replies: int = 1
  state_address: str = ""
  takes_shards: bool = False
  resumes: str = ""
  reads: tuple[int, ...] = ()
  returned: tuple[Position, ...] = ()
  adoptions: tuple[Adoption, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected(LearnerEvent):
  """Its control stream ended without a goodbye."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Left(LearnerEvent):
  """It said goodbye."""

  reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heard(LearnerEvent):
  """Any byte of it: a heartbeat, or chunks of a bulk transfer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reported(LearnerEvent):
  """Its progress at a step boundary.

  Attributes:
    step: Steps taken by this process; under `wait_for_publication` the
      cumulative index, which starts at the t of its welcome.
    counts: Per fragment, since its last adoption.
    positions: Per data shard it reads, the next batch.
    returned: Per data shard it gave up, the next batch that it did not read.
    boundaries: Under `wait_for_publication`: (fragment, step index at which it
      was copied) for every copy not yet published to it.
    waiting: It takes no step until a publication arrives.
    exhausted: Its data is used up; it takes no more steps.
    metrics: Newest values for the run's records, such as its loss.
  """

  step: int
  counts: tuple[Counts, ...]
  positions: tuple[Position, ...] = ()
  returned: tuple[Position, ...] = ()
  boundaries: tuple[tuple[int, int], ...] = ()
  waiting: bool = False
  exhausted: bool = False
  metrics: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Applied(LearnerEvent):
  """It adopted a published version at a step boundary.

  Attributes:
    step: Its step at that boundary.
    counts: Steps and tokens of this fragment that the adoption reset.
    exact: What it adopted was an exact publication; it trains no further.
  """

  fragment: int
  version: Version
  step: int
  counts: Counts = ZERO
  exact: bool = False

  @property
  def adoption(self) -> Adoption:
    return Adoption(self.fragment, self.version, self.step, self.counts)


RECOVERY_SOURCES = ("peer", "relay", "checkpoint", "fresh", "snapshot")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(LearnerEvent):
  """A process that joined a run under way has its inner optimizer's state.

  Attributes:
    source: One of RECOVERY_SOURCES.
    donor: The learner that it has the state from; "" where it is none.
    reason: What was done, and what was tried before in vain.
  """

  source: str
  donor: str = ""
  reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pushing(LearnerEvent):
  """Bytes of a reply arrived; at most one such event a second per reply.

  Also opens the upload: the first one has num_bytes == 0.
  """

  fragment: int
  round: int
  attempt: int
  num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushBroken(LearnerEvent):
  """An upload ended before it was whole; nothing of it is kept."""

  fragment: int
  round: int
  attempt: int
  reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replied(LearnerEvent):
  """A whole reply is in its buffer; length and checksum have passed.

  Attributes:
    base: The version that the delta is taken against.
    counts: Steps and loss tokens that the delta covers.
    norm: L2 norm of the delta over the fragment, float64; inf or nan where an
      element is not finite.
    lr_sum: Sum of the inner learning rate over the covered steps; 0 if the
      learner does not say (then `norm` is judged per step).
    positions: Data positions at the boundary of the copy.
  """

  fragment: int
  round: int
  attempt: int
  base: Version
  counts: Counts
  norm: float
  lr_sum: float = 0.0
  positions: tuple[Position, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Misspoke(LearnerEvent):
  """It said what cannot be, and was told so; nothing of it is taken."""

  reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Merged(Event):
  """The merge worker has the new bytes of a fragment ready to serve.

  Attributes:
    digest: Of the new Theta, float32; see `algorithm.digest`.
  """

  fragment: int
  round: int
  version: Version
  digest: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ticked(Event):
  """Time passed; sent when `machine.next_timer` falls due."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Event):
  """A signal, or an admin, asks the syncer to end the run now, in order."""

  reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvictRequested(Event):
  """An admin shuts the present process of a learner id out."""

  learner: str
  reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequested(Event):
  """Somebody wants a consistent cut of the run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MarkerDone(LearnerEvent):
  """A learner's part of a cut is on disk, or the reason why it is not."""

  snapshot: int
  saved: bool
  reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Captured(Event):
  """The syncer has copied its own part of a cut.

  Attributes:
    path: Where the cut is on disk, with who is in it; empty before.
    failure: Why it cannot be written.
  """

  snapshot: int
  path: str = ""
  failure: str = ""


# --- effects ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
  reason: str = ""  # A sentence; status, logs and tests use the same one.


class FragmentClock(NamedTuple):
  """What a joining learner is told of one fragment.

  Attributes:
    version: The newest published version.
    n0: The n from which this epoch started (bases with n <= n0 stay valid).
    merged_n: Version n that the newest reply of this learner was merged into;
      0 if none was.
    merged_round: Round of that reply; -1 if none.
    merged_attempt: Attempt of that reply; -1 if none.
  """

  version: Version
  n0: int
  merged_n: int = 0
  merged_round: int = -1
  merged_attempt: int = -1


class Donor(NamedTuple):
  """A learner that serves its state, and where."""

  learner: str
  address: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Effect):
  """Admits a process; the syncer adds a session secret.

  Attributes:
    donor: Whom a new process may ask for its inner optimizer's state.
  """

  learner: str
  nonce: str
  incarnation: int
  reconnect: bool
  clocks: tuple[FragmentClock, ...]
  positions: tuple[Position, ...]
  t: int
  donor: Donor | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reject(Effect):
  """Refuses a hello; `code` is a name in wire/status.py."""

  learner: str
  nonce: str
  code: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fence(Effect):
  """An incarnation is over: its stream is closed, its answers are refused."""

  learner: str
  incarnation: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shards(Effect):
  """All data shards that a process is to read from its next boundary on.

  Those that it reads already go on where they are; what is missing it gives up,
  and says where it stopped (`Reported.returned`).
  """

  learner: str
  incarnation: int
  positions: tuple[Position, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pull(Effect):
  """Ask one member for its reply."""

  learner: str
  incarnation: int
  fragment: int
  round: int
  attempt: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Effect):
  """The answer to a `Replied`: its outcome. Its buffer stays on accepted and
  carried, and is freed on everything else."""

  key: ReplyKey
  outcome: Outcome
  first: Outcome | None = None  # Of a duplicate: what the first one was told.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Free(Effect):
  """Free the buffer of a reply that will not be merged after all."""

  key: ReplyKey


class MergeInput(NamedTuple):
  """One reply to merge: where its buffer is, and its weight (Sec. 3.2)."""

  key: ReplyKey
  weight: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Merge(Effect):
  """Merge these replies, in this order, into `version` of the fragment."""

  fragment: int
  round: int
  attempt: int
  version: Version
  inputs: tuple[MergeInput, ...]


class Receiver(NamedTuple):
  """One receiver of a publication, and what became of its reply."""

  learner: str
  incarnation: int
  outcome: Outcome
  reason: str = ""
  round: int = -1
  attempt: int = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Effect):
  """Tell the receivers that a version can be fetched.

  Attributes:
    exact: Served in float32 and adopted with alpha 0 (the end of a run). The
      version may be one that the receiver already has in a coarser format.
  """

  fragment: int
  version: Version
  receivers: tuple[Receiver, ...]
  exact: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp(Effect):
  """A round ended without a merge."""

  fragment: int
  round: int
  attempt: int
  receivers: tuple[Receiver, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Marker(Effect):
  """Tells members (learner, incarnation) to save once they hold the clock."""

  snapshot: int
  clock: tuple[Version, ...]
  members: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOver(Effect):
  """A cut is taken; with a reason: it is not, and that is why.

  Attributes:
    snapshot: Its number; 0 where it was refused before it had one.
    learners: Whose parts are on disk.
    skipped: "ID: why" of the others; also of who was away at the markers.
  """

  snapshot: int
  path: str = ""
  clock: tuple[Version, ...] = ()
  learners: tuple[str, ...] = ()
  skipped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending(Effect):
  """Tell every learner to stop stepping; it still answers and adopts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Effect):
  """The run is over. `missing`: learners that did not acknowledge the end."""

  exit_code: int
  missing: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alarm(Effect):
  """Something an operator should see; `kind` is stable, for metrics."""

  kind: str


def to_dict(value: Event | Effect) -> dict[str, Any]:
  """An event or effect as JSON-ready values, named by its class."""
  fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
  return {"type": type(value).__name__, **fields}
