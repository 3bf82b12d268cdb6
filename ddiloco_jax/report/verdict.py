"""The verdict on a storm: figures, the bars they are held against, a table."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco_jax.report import history
from ddiloco_jax.report.ordeal import Line, Ordeal, is_balanced

# From the promise of the project: what a storm may cost.
MAX_GAP_S = 10.0
MIN_LIVE_SHARE = 6 / 8
MIN_CONTRIBUTING_SHARE = 7 / 8
MAX_LOSS_RATIO = 1.02
MAX_JOIN_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
  """One line of a verdict.

  Attributes:
    name: Of the figure.
    value: None where the storm does not say.
    rule: The bar, in words.
    holds: Whether the value is within it; a figure that is not known holds
      only where nothing could be measured, such as a syncer never killed.
  """

  name: str
  value: float | int | bool | None
  rule: str
  holds: bool


def measure(ordeal: Ordeal, num_learners: int) -> dict[str, Any]:
  """The figures of one storm, all but the loss; from its tapes."""
  assert ordeal.state is not None
  end_s = ordeal.end_s
  lost, repeated = _versions(ordeal)
  step_s = statistics.median(ordeal.step_s) if ordeal.step_s else 0.0
  rules = ordeal.state.rules
  slot_s = step_s * rules.cycle_steps / rules.num_fragments
  returns = _learner_returns(ordeal)
  back = _syncer_returns(ordeal)
  num_faults = sum(
    line.values["done"] and line.at_s <= end_s for line in ordeal.of("fault")
  )
  return {
    "num_learners": num_learners,
    "num_faults": num_faults,
    "num_merges": len(ordeal.merges),
    "duration_s": end_s,
    "step_s": step_s,
    "uptime": history.share_of_windows(
      [tuple(reports) for reports in ordeal.progress.values()], end_s, 0.0
    ),
    "versions_lost": lost,
    "versions_repeated": repeated,
    "ledger_balanced": is_balanced(ordeal.state),
    "contributors_over_eligible_median": _contributing(ordeal, end_s),
    "contributors_median": _median(
      [len(set(m.contributors)) for m in ordeal.merges if 0 <= m.at_s <= end_s]
    ),
    "live_mean": _live_mean(ordeal, end_s),
    "version_gap_max_s": _gap_max_s(ordeal, end_s),
    "num_learner_returns": len(returns),
    "learner_return_s_median": _median([merged for _, merged in returns]),
    "learner_return_bound_s": _plus(
      _median([joined for joined, _ in returns]), 2 * slot_s
    ),
    "num_syncer_returns": len(ordeal.starts) - 1,
    "syncer_return_s_max": max((joined for joined, _ in back), default=None),
    "syncer_next_merge_s_max": max((m for _, m in back), default=None),
    "syncer_next_merge_bound_s": MAX_JOIN_S + 2 * slot_s + step_s,
  }


def judge(figures: Mapping[str, Any]) -> list[Bar]:
  """Holds the figures of one storm against their bars."""
  f = figures
  num = f["num_learners"]
  is_killed = f["num_syncer_returns"] > 0
  return_bound, merge_bound = (
    f["learner_return_bound_s"],
    f["syncer_next_merge_bound_s"],
  )
  bars = [
    ("uptime", "1, in windows of 5 s", _is(f["uptime"], 1.0, 1.0)),
    ("versions_lost", "0", f["versions_lost"] == 0),
    ("versions_repeated", "0", f["versions_repeated"] == 0),
    ("ledger_balanced", "true", f["ledger_balanced"]),
    (
      "contributors_over_eligible_median",
      "at least 7/8",
      _is(f["contributors_over_eligible_median"], MIN_CONTRIBUTING_SHARE),
    ),
    (
      "live_mean",
      f"at least {MIN_LIVE_SHARE * num:g} of {num}",
      _is(f["live_mean"], MIN_LIVE_SHARE * num),
    ),
    (
      "version_gap_max_s",
      f"at most {MAX_GAP_S:g} while a syncer listens",
      _is(f["version_gap_max_s"], 0.0, MAX_GAP_S),
    ),
    (
      "learner_return_s_median",
      "at most "
      + ("-" if return_bound is None else f"{return_bound:.2f}")
      + ", start + compile + 2 slots",
      not f["num_learner_returns"]
      or _is(f["learner_return_s_median"], 0.0, return_bound),
    ),
    (
      "syncer_return_s_max",
      f"at most {MAX_JOIN_S:g}, listening to joined",
      not is_killed or _is(f["syncer_return_s_max"], -1.0, MAX_JOIN_S),
    ),
    (
      "syncer_next_merge_s_max",
      f"at most {merge_bound:.2f}, 2 s + 2 slots + a step",
      not is_killed or _is(f["syncer_next_merge_s_max"], 0.0, merge_bound),
    ),
  ]
  if "loss_ratio_to_fault_free" in f:
    ratio = f["loss_ratio_to_fault_free"]
    bars.append(
      (
        "loss_ratio_to_fault_free",
        f"at most {MAX_LOSS_RATIO:g}, at equal merged tokens",
        _is(ratio, 0.0, MAX_LOSS_RATIO),
      )
    )
  return [Bar(name, f[name], rule, holds) for name, rule, holds in bars]


def to_text(bars: Sequence[Bar]) -> str:
  """The verdict as a table for a terminal."""
  width = max(len(bar.name) for bar in bars)
  rows = [
    f"  {'PASS' if bar.holds else 'FAIL'}  {bar.name:<{width}}"
    f"  {_show(bar.value):>10}  {bar.rule}"
    for bar in bars
  ]
  whole = "PASS" if all(bar.holds for bar in bars) else "FAIL"
  return "\n".join([*rows, f"  {whole}"])


def _show(value: Any) -> str:
  if value is None:
    return "-"
  if isinstance(value, bool):
    return str(value).lower()
  return f"{value:.4g}"


def _is(value: float | None, least: float, most: float | None = None) -> bool:
  if value is None:
    return False
  return least <= value and (most is None or value <= most)


def _median(values: Sequence[float]) -> float | None:
  return statistics.median(values) if values else None


def _plus(a: float | None, b: float) -> float | None:
  return None if a is None else a + b


def _versions(ordeal: Ordeal) -> tuple[int, int]:
  """Published versions that a later epoch does not have; that came twice."""
  lost = 0
  seen: set[tuple[int, int]] = set()
  repeated = 0
  newest: dict[int, int] = {}
  published = iter(ordeal.published)
  version = next(published, None)
  for epoch, starts in sorted(ordeal.starts.items()):
    lost += sum(max(0, n - starts[p]) for p, n in newest.items())
    newest = {}
    while version is not None and version.epoch == epoch:
      key = version.fragment, version.n
      repeated += key in seen
      seen.add(key)
      newest[version.fragment] = version.n
      version = next(published, None)
  return lost, repeated


def _contributing(ordeal: Ordeal, end_s: float) -> float | None:
  shares = []
  for merge in ordeal.merges:
    if 0.0 <= merge.at_s <= end_s:
      who = {learner for learner, _ in merge.contributors}
      shares.append(len(who) / max(1, len(who | set(merge.members))))
  return _median(shares)


def _spans(ordeal: Ordeal, end_s: float) -> list[tuple[int, float, float]]:
  """(epoch, from, to) in which a syncer listened during the storm."""
  listening = {
    line.values["epoch"]: line.at_s for line in ordeal.of("listening")
  }
  last: dict[int, float] = {}
  for when in (*ordeal.live, *ordeal.published, *ordeal.joins):
    last[when.epoch] = max(last.get(when.epoch, when.at_s), when.at_s)
  newest = max(ordeal.starts)
  ends = {line.values["epoch"]: line.at_s for line in ordeal.of("silent")}
  return [
    (
      epoch,
      max(0.0, start),
      min(end_s, end_s if epoch == newest else ends.get(epoch, last[epoch])),
    )
    for epoch, start in listening.items()
    if epoch in last and start < end_s
  ]


def _gap_max_s(ordeal: Ordeal, end_s: float) -> float | None:
  gaps = []
  for epoch, start, end in _spans(ordeal, end_s):
    times = [v.at_s for v in ordeal.published if v.epoch == epoch]
    inside = [start, *(t for t in times if start < t < end), end]
    gaps += [b - a for a, b in itertools.pairwise(inside)]
  return max(gaps, default=None)


def _live_mean(ordeal: Ordeal, end_s: float) -> float | None:
  """Over the time in which a syncer listened."""
  total = weight = 0.0
  for epoch, start, end in _spans(ordeal, end_s):
    points = [each for each in ordeal.live if each.epoch == epoch]
    for i, (at_s, _, num) in enumerate(points):
      until = points[i + 1].at_s if i + 1 < len(points) else end
      span = max(0.0, min(end, until) - max(start, at_s))
      total, weight = total + num * span, weight + span
  return total / weight if weight else None


def _learner_returns(ordeal: Ordeal) -> list[tuple[float, float]]:
  """(to its join, to its first merged reply) of restarts left in peace."""
  found = []
  for line in ordeal.of("start"):
    name = line.values["process"]
    if line.values["life"] == 1 or name == "syncer":
      continue
    learner = name.removeprefix("learner-")
    joins = [
      j for j in ordeal.joins if j.learner == learner and j.at_s >= line.at_s
    ]
    if not joins:
      continue
    who = learner, joins[0].nonce
    merged = next((m for m in ordeal.merges if who in m.contributors), None)
    if merged is None or _is_disturbed(
      ordeal, name, line.at_s, min(merged.at_s, ordeal.end_s)
    ):
      continue
    if merged.at_s <= ordeal.end_s:
      found.append((joins[0].at_s - line.at_s, merged.at_s - line.at_s))
  return found


def _syncer_returns(ordeal: Ordeal) -> list[tuple[float, float]]:
  """(to its join, to its next merged reply) of learners left in peace.

  From the moment that a restarted syncer listens again.
  """
  found = []
  for line in ordeal.of("listening")[1:]:
    epoch = line.values["epoch"]
    for name in _running(ordeal, line):
      if _is_disturbed(
        ordeal, name, line.at_s - 1.0, line.at_s + 5.0, syncer=False
      ):
        continue
      learner = name.removeprefix("learner-")
      joined = _first(
        j.at_s for j in ordeal.joins if j[1:3] == (epoch, learner)
      )
      merged = _first(
        m.at_s
        for m in ordeal.merges
        if m.epoch == epoch and learner in [who for who, _ in m.contributors]
      )
      found.append((joined - line.at_s, merged - line.at_s))
  return found


def _first(times: Any) -> float:
  return next(iter(times), float("inf"))


def _running(ordeal: Ordeal, at: Line) -> list[str]:
  """Processes that ran when it listened, and had joined in that very life."""
  since: dict[str, float] = {}
  for line in ordeal.lines:
    if line.at_s > at.at_s:
      break
    if line.what == "start":
      is_first = line.values["life"] == 1
      begin_s = -math.inf if is_first else line.at_s
      since[line.values["process"]] = begin_s
    elif line.what == "end":
      since.pop(line.values["process"], None)
  joined: dict[str, float] = {}
  for join in ordeal.joins:
    if join.at_s < at.at_s:
      joined[f"learner-{join.learner}"] = join.at_s
  # The first lives began before the storm, and had all joined.
  return sorted(n for n in joined if n in since and joined[n] >= since[n])


def _is_disturbed(
  ordeal: Ordeal,
  name: str,
  start_s: float,
  end_s: float,
  *,
  syncer: bool = True,
) -> bool:
  """Whether a fault hit it, or the syncer, from the one to the other."""
  names = (name, "syncer") if syncer else (name,)
  for line in ordeal.of("fault"):
    begin = line.values["fault"]["at_s"]
    end = begin + line.values["fault"]["lasts_s"]
    if line.values["process"] in names and begin < end_s and end > start_s:
      return True
  return False


def mean_loss_ratio(seeds: Sequence[Mapping[str, Any]]) -> float | None:
  """Over storms that have a pair; None if one has none."""
  ratios = [f.get("loss_ratio_to_fault_free") for f in seeds]
  known = [ratio for ratio in ratios if ratio is not None]
  return (
    statistics.fmean(known) if known and len(known) == len(ratios) else None
  )


def holds(told: Sequence[Sequence[Bar]], mean: float | None) -> bool:
  """Every bar of every storm; of the loss, the mean over them is judged.

  Without a storm, nothing holds.
  """
  loss = "loss_ratio_to_fault_free"
  bars = [bar for bars in told for bar in bars]
  has_pairs = any(bar.name == loss for bar in bars)
  return (
    bool(bars)
    and all(bar.holds for bar in bars if bar.name != loss)
    and (not has_pairs or _is(mean, 0.0, MAX_LOSS_RATIO))
  )
