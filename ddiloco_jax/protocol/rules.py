"""The settings that the protocol decides by, with the paper's defaults.

One frozen value, owned by the syncer: learners take from it what must agree.
(arXiv 2604.21428, Sec. 3 and 5.)
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
  """What the state machine decides by.

  Attributes:
    num_fragments: P. At most `cycle_steps`.
    cycle_steps: H, the syncer steps from one slot of a fragment to its next.
    max_open_rounds: tau, the rounds in flight at once.
    quorum: K, the replies without which nothing is merged.
    alpha: Share of its own value that a learner keeps when it adopts.
    members: "live" pulls from every live, training learner with progress;
      "reported" only from those that reported a step since t last advanced.
    pace: Whose step time t follows: the "median" training learner's, or the
      "fastest".
    grace_fraction: gamma of the adaptive grace window (Eq. 3); 0 turns it off.
    average_weight: Weight of a new sample in the moving averages of quorum and
      sync times.
    step_weight: Weight of a new sample in a learner's average step time. With
      0.2, t outran four learners on two cores by 19 %: the median picks among
      noisy estimates the low ones.
    stale: "merge" a reply that is anchored at an older base, or "reject" it.
    max_staleness: Versions beyond which a stale reply is refused.
    outlier_factor: A reply whose norm per unit of learning rate is beyond
      this many times the running median is refused.
    lease_s: Silence after which a learner is not live.
    min_deadline_s: The least time a round is given to reach its quorum.
    quorum_timeout_s: With fewer than K learners for so long, the run ends.
    flush_s: Bound on all flush rounds at the end of a run together.
    acknowledge_s: How long the end waits for learners to adopt the result.
    num_syncer_steps: The run ends at this t; 0 for no such bound.
    num_tokens: The run ends once so many tokens are merged (mean over
      fragments, weighted by `fragment_params`); 0 for no such bound.
    wait_for_publication: Learners block until what they copied is published
      (the synchronous presets); t then follows the learners' own step index.
    adoption_delay_steps: Under `wait_for_publication`: own steps from a copy
      to the boundary at which its publication is waited for.
    max_ahead: Own steps that a learner may be ahead of the last stamp of t
      before it waits; 0 for no bound.
    max_learners: Learners admitted at once.
    num_shards: Disjoint data shards; each is read by one learner at a time.
    shards_per_learner: Shards that a learner owns, as far as there are so many.
    shard_lease_s: The shards of a learner that is away for so long are lent to
      others until it comes back; 0: never. A reader that was told to give one
      back has as long to do so.
    fragment_params: Parameters per fragment, the weights of run totals.
  """

  num_fragments: int = 24
  cycle_steps: int = 24
  max_open_rounds: int = 2
  quorum: int = 1
  alpha: float = 0.0
  members: str = "live"
  pace: str = "median"
  grace_fraction: float = 0.8
  average_weight: float = 0.2
  step_weight: float = 0.05
  stale: str = "merge"
  max_staleness: int = 8
  outlier_factor: float = 10.0
  lease_s: float = 15.0
  min_deadline_s: float = 5.0
  quorum_timeout_s: float = 600.0
  flush_s: float = 30.0
  acknowledge_s: float = 30.0
  num_syncer_steps: int = 0
  num_tokens: int = 0
  wait_for_publication: bool = False
  adoption_delay_steps: int = 0
  max_ahead: int = 0
  max_learners: int = 64
  num_shards: int = 64
  shards_per_learner: int = 1
  shard_lease_s: float = 60.0
  fragment_params: tuple[int, ...] = ()

  def __post_init__(self):
    for name in (
      "num_fragments",
      "max_open_rounds",
      "quorum",
      "shards_per_learner",
    ):
      _check(self, name, getattr(self, name) >= 1, "at least 1")
    for name in ("alpha", "grace_fraction", "average_weight", "step_weight"):
      _check(self, name, 0 <= getattr(self, name) <= 1, "in 0..1")
    for name in ("outlier_factor", "lease_s", "min_deadline_s"):
      _check(self, name, getattr(self, name) > 0, "above 0")
    for name in (
      "max_staleness",
      "flush_s",
      "acknowledge_s",
      "num_syncer_steps",
      "num_tokens",
      "adoption_delay_steps",
      "max_ahead",
      "shard_lease_s",
    ):
      _check(self, name, getattr(self, name) >= 0, "at least 0")
    for name, *choices in (
      ("members", "live", "reported"),
      ("pace", "median", "fastest"),
      ("stale", "merge", "reject"),
    ):
      known = getattr(self, name) in choices
      _check(self, name, known, f"one of {', '.join(choices)}")


def _check(rules: Rules, name: str, holds: bool, rule: str) -> None:
  if not holds:
    raise ValueError(
      f"sync.{name} is {getattr(rules, name)!r}: it must be {rule}."
    )
