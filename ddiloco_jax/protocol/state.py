"""The state of a run as one frozen value: names, numbers and times only.

Nothing here is ever written: `turn.Turn` makes the next State of it.
(arXiv 2604.21428, Sec. 3.)
"""

import dataclasses
from typing import NamedTuple

from ddiloco_jax.protocol.events import (
  ZERO,
  Counts,
  Position,
  ReplyKey,
  Version,
)
from ddiloco_jax.protocol.ledger import Account
from ddiloco_jax.protocol.rules import Rules


class Member(NamedTuple):
  """One process, as a round asks it."""

  learner: str
  incarnation: int


class Asked(NamedTuple):
  """A reply that is under way.

  Attributes:
    at: When it was asked for.
    moved_at: When its bytes last moved, while an upload is open; else None.
    num_bytes: How many of them had arrived then.
    carried: Its round has closed; it enters a later one.
  """

  fragment: int
  round: int
  attempt: int
  at: float
  moved_at: float | None = None
  num_bytes: int = 0
  carried: bool = False

  @property
  def alive_at(self) -> float:
    """The last time that there was reason to expect it."""
    return self.at if self.moved_at is None else self.moved_at


class Scale(NamedTuple):
  """A delta's norm, made comparable."""

  per_step: float
  per_lr: float | None  # Per unit of learning rate; None if that is not told.


class Reply(NamedTuple):
  """A whole reply that waits to be merged."""

  key: ReplyKey
  base: Version
  counts: Counts
  weight: float
  scale: Scale
  at: float


class Refusal(NamedTuple):
  key: ReplyKey
  kind: str
  reason: str
  scale: Scale | None  # Of an outlier.


class Due(NamedTuple):
  """A fragment that waits for its round; attempt 0 gets a new round number."""

  fragment: int
  slot: int  # The t at which it became due.
  round: int = -1
  attempt: int = 0
  not_before: float = 0.0


class Round(NamedTuple):
  """One fragment, from its opening to its publication."""

  fragment: int
  round: int
  attempt: int
  slot: int
  opened_at: float
  deadline: float
  quorum: int
  members: tuple[Member, ...]
  waiting: tuple[Member, ...]
  replies: tuple[Reply, ...] = ()
  refused: tuple[Refusal, ...] = ()
  quorum_at: float | None = None
  grace_end: float | None = None
  merging: bool = False
  flush: bool = False


class CalledBack(NamedTuple):
  """A lent shard that its reader was told, or is to be told, to give up."""

  shard: int
  since: float


class Learner(NamedTuple):
  """What is known of the newest process of one learner id.

  Attributes:
    shards: Data shards that it owns; kept while it is away.
    reads: Those that this incarnation may read, lent ones included.
    called_back: Of these, lent ones that are to be given back.
    takes_shards: It obeys the effect `Shards`.
    lend_at: Its shards are not lent to others before.
    live: Heard within the lease, and not gone.
    training: Took a step lately, or waits for a publication, or is exhausted.
    connected: Its control stream is open.
    gone: It left or was fenced; nothing of this incarnation is taken.
    num_steps: Steps seen of this process; the first two are not timed.
    untimed: Its next report ends a silence, which is no step's time.
    step_s: Moving average of its step time; 0 before there is one.
    pacing_s: Its entry in `State.step_times`; 0 if it has none.
    reported_t: The t at which it last reported a new step.
    heard: A report of it came since the syncer's start.
    adopted_at: Per fragment, its step when it adopted its base; None where that
      is not known.
    peak_tokens: The most tokens a step that its reports came to.
    exact: Fragments whose exact last version it has adopted.
    state_address: Where it serves its state to peers; "" if it does not.
    recovered: Where it has its inner optimizer's state from, as a sentence.
    fenced_nonces: The last processes of its id that newer ones replaced.
    evicted_nonces: All of them that were evicted, maybe with this one.
  """

  learner: str
  nonce: str
  incarnation: int
  shards: tuple[int, ...]
  reads: tuple[int, ...]
  joined_at: float
  heard_at: float
  step: int
  counts: tuple[Counts, ...]
  bases: tuple[Version | None, ...]
  max_replies: int = 1
  takes_shards: bool = False
  called_back: tuple[CalledBack, ...] = ()
  lend_at: float = 0.0
  live: bool = True
  training: bool = False
  connected: bool = True
  gone: bool = False
  stepped_at: float = 0.0
  num_steps: int = 0
  untimed: bool = False
  step_s: float = 0.0
  pacing_s: float = 0.0
  reported_t: int = -1
  waiting: bool = False
  exhausted: bool = False
  fresh: bool = True
  heard: bool = False
  adopted_at: tuple[int | None, ...] = ()
  peak_tokens: float = 0.0
  positions: tuple[Position, ...] = ()
  boundaries: tuple[tuple[int, int], ...] = ()
  metrics: tuple[tuple[str, float], ...] = ()
  asked: tuple[Asked, ...] = ()
  exact: tuple[int, ...] = ()
  fenced_nonces: tuple[str, ...] = ()
  state_address: str = ""
  recovered: str = ""
  evicted_nonces: tuple[str, ...] = ()


class FragmentState(NamedTuple):
  """One fragment's version, last contributors and guard."""

  version: Version
  num_merges: int = 0
  contributors: tuple[Member, ...] = ()
  merged: Counts = ZERO
  scales_per_lr: tuple[float, ...] = ()
  scales_per_step: tuple[float, ...] = ()


class Sync(NamedTuple):
  """A published version on its way to the median learner."""

  version: Version
  replied_at: float
  need: int
  seen: int = 0


class Cut(NamedTuple):
  """A consistent snapshot, under way.

  Attributes:
    until: Bound on the present phase.
    marked: The rounds are closed and the markers are out.
    copied: The syncer has its own part, at least in memory.
    awaited: Who has not answered the marker.
  """

  snapshot: int
  until: float
  marked: bool = False
  copied: bool = False
  path: str = ""
  clock: tuple[Version, ...] = ()
  awaited: tuple[Member, ...] = ()
  saved: tuple[str, ...] = ()
  skipped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
  """The end of a run, under way.

  Attributes:
    pending: Fragments whose flush round is still to come.
    until: Bound on the present phase.
    exact: The last versions are published; learners acknowledge them.
    awaited: Learners that have not acknowledged every one of them.
    accounts: As they were before a finished run closed its books: if it is
      extended, learners that missed the end go on to count from there.
  """

  cause: str
  reason: str
  exit_code: int
  pending: tuple[int, ...]
  until: float
  exact: bool = False
  awaited: tuple[str, ...] = ()
  finished: bool = False
  missing: tuple[str, ...] = ()
  accounts: dict[str, tuple[Account, ...]] = dataclasses.field(
    default_factory=dict
  )


class State(NamedTuple):
  """Everything the protocol decides by.

  Attributes:
    starts: Per epoch, from the first, the n that each fragment started from.
    t_due: When t may next advance.
    num_events: Consumed in this epoch.
    num_reported: Learners that reported a new step since t last advanced.
    carried: Whole carried replies that wait for a round of their fragment.
    step_times: Sorted step times of the learners that set the pace.
    scan_at: No lease and no training learner lapses before.
    lacking_since: Since when fewer than K learners train.
    newest_merge: The fragment merged last; -1 before the first merge.
    accepted: Per shard, the next batch after what accepted replies cover.
  """

  rules: Rules
  epoch: int
  starts: tuple[tuple[int, ...], ...]
  fragments: tuple[FragmentState, ...]
  learners: dict[str, Learner]
  accounts: dict[str, tuple[Account, ...]]
  accepted: dict[int, int]
  syncs: dict[int, Sync]
  counters: dict[str, int]
  num_events: int = 0
  now: float = 0.0
  t: int = 0
  t_due: float = 0.0
  num_reported: int = 0
  rounds: tuple[Round, ...] = ()
  queue: tuple[Due, ...] = ()
  carried: tuple[Reply, ...] = ()
  step_times: tuple[float, ...] = ()
  step_s: float | None = None
  quorum_s: float | None = None
  sync_s: float | None = None
  num_live: int = 0
  num_training: int = 0
  num_pacing: int = 0
  num_exhausted: int = 0
  scan_at: float | None = None
  carried_check_at: float | None = None
  lacking_since: float | None = None
  has_joined: bool = False
  newest_merge: int = -1
  next_round: int = 1
  next_incarnation: int = 1
  next_snapshot: int = 1
  cut: Cut | None = None
  end: End | None = None
  alarms: tuple[str, ...] = ()


def initial(rules: Rules, epoch: int = 1) -> State:
  """The state of a run before its first event.

  Args:
    rules: What the run decides by; checked here.
    epoch: The first epoch is 1.

  Raises:
    ValueError: Rules that contradict each other.
  """
  _check(rules)
  num = rules.num_fragments
  zeros = (0,) * num
  return State(
    rules=rules,
    epoch=epoch,
    starts=(zeros,) * epoch,
    fragments=(FragmentState(version=Version(epoch, 0)),) * num,
    learners={},
    accounts={},
    accepted={},
    syncs={},
    counters={},
  )


def _check(rules: Rules) -> None:
  num, cycle = rules.num_fragments, rules.cycle_steps
  if not 1 <= num <= cycle:
    raise ValueError(
      f"num_fragments is {num} and cycle_steps {cycle}: every fragment needs "
      "a slot of its own, so 1 <= num_fragments <= cycle_steps; raise "
      "cycle_steps or lower num_fragments"
    )
  if rules.fragment_params and len(rules.fragment_params) != num:
    raise ValueError(
      f"fragment_params has {len(rules.fragment_params)} entries for {num} "
      "fragments: give one per fragment, or none"
    )
  for name, least in (
    ("quorum", 1),
    ("max_open_rounds", 1),
    ("max_learners", 1),
    ("num_shards", 1),
    ("max_staleness", 0),
  ):
    value = getattr(rules, name)
    if value < least:
      raise ValueError(f"{name} is {value}; it must be at least {least}")
  if rules.quorum > rules.max_learners:
    raise ValueError(
      f"quorum {rules.quorum} > max_learners {rules.max_learners}: no round "
      "could ever be merged; raise max_learners or lower quorum"
    )
  for name, allowed in (
    ("members", ("live", "reported")),
    ("pace", ("median", "fastest")),
    ("stale", ("merge", "reject")),
  ):
    value = getattr(rules, name)
    if value not in allowed:
      raise ValueError(f"{name} is {value!r}; choose from {allowed}")
  for name in ("lease_s", "min_deadline_s", "quorum_timeout_s"):
    value = getattr(rules, name)
    if not value > 0:
      raise ValueError(f"{name} is {value}; it must be more than 0 seconds")
  if rules.quorum_timeout_s < rules.lease_s:
    raise ValueError(
      f"quorum_timeout_s {rules.quorum_timeout_s} < lease_s {rules.lease_s}: "
      "the run would end before a silent learner is known to be lost; raise "
      "quorum_timeout_s or lower lease_s"
    )
