"""The figures of a run that fit on one screen: summary.json, and as text."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from ddiloco_jax.report import history as histories
from ddiloco_jax.report.history import History


def summarise(
  history: History, held_out: Mapping[str, float | None]
) -> dict[str, Any]:
  """The content of summary.json.

  Args:
    history: Of the run.
    held_out: loss_start, loss_end and bigram_entropy, nats per token; what was
      not evaluated is None or missing.

  Returns:
    JSON-ready values; None where the run does not say.
  """
  books = history.books
  return {
    "run_id": history.run_id,
    "ending": history.ending,
    "loss_start": held_out.get("loss_start"),
    "loss_end": held_out.get("loss_end"),
    "bigram_entropy": held_out.get("bigram_entropy"),
    "uptime": histories.uptime(history),
    "duration_s": history.end_s,
    "contributors_median": histories.contributors_median(history),
    "learners_live_median": histories.learners_live_median(history),
    "realised_h": list(history.realised_h),
    "configured_h": history.cycle_steps,
    "tokens_processed": books.get("reported", 0.0),
    "tokens_merged": books.get("merged", 0.0),
    "tokens_discarded": math.fsum(discarded(books).values()),
    "tokens_pending": books.get("pending", 0.0),
    "tokens_discarded_by_reason": discarded(books),
    "num_merges": len(history.merges),
    "merges_by_learner": histories.merges_by_learner(history),
    "merges_after_return": histories.merges_after_return(history),
    "steps_by_learner": histories.steps_by_learner(history),
    "counters": dict(history.counters),
  }


def discarded(books: Mapping[str, float]) -> dict[str, float]:
  """Tokens discarded, by reason."""
  prefix = "discarded/"
  return {
    name.removeprefix(prefix): tokens
    for name, tokens in books.items()
    if name.startswith(prefix)
  }


def write_summary(summary: Mapping[str, Any], path: pathlib.Path) -> None:
  """Writes strict JSON, whole or not at all."""
  part = path.with_suffix(".part")
  text = json.dumps(_finite(summary), indent=2, allow_nan=False)
  part.write_text(text + "\n", encoding="utf-8")
  part.replace(path)


def to_text(summary: Mapping[str, Any]) -> str:
  """The summary as a few aligned lines for a terminal."""
  rows = [(label, value) for label, value in _rows(summary) if value]
  width = max(len(label) for label, _ in rows)
  return "\n".join(f"  {label:<{width}}  {value}" for label, value in rows)


def _rows(s: Mapping[str, Any]) -> list[tuple[str, str]]:
  after_return = ", ".join(
    f"learner {who} in {count} merges"
    for who, count in s["merges_after_return"].items()
  )
  reasons = ", ".join(
    f"{name} {tokens:,.0f}"
    for name, tokens in s["tokens_discarded_by_reason"].items()
    if tokens
  )
  steps = ", ".join(f"{who}: {n}" for who, n in s["steps_by_learner"].items())
  return [
    ("run ended", s["ending"]),
    ("held-out loss", _loss(s)),
    ("uptime", "" if s["uptime"] is None else f"{s['uptime']:.1%}"),
    ("contributors per merge", _contributors(s)),
    ("back after a failure", after_return),
    ("steps by learner", steps),
    ("realised H per fragment", _realised_h(s)),
    ("tokens processed", f"{s['tokens_processed']:,.0f}"),
    ("  merged", _share(s["tokens_merged"], s["tokens_processed"])),
    (
      "  discarded",
      _share(s["tokens_discarded"], s["tokens_processed"])
      + (f"  ({reasons})" if reasons else ""),
    ),
    ("  pending", _share(s["tokens_pending"], s["tokens_processed"])),
  ]


def _loss(s: Mapping[str, Any]) -> str:
  if s["loss_end"] is None:
    return "not evaluated"
  start = "" if s["loss_start"] is None else f"{s['loss_start']:.4f} -> "
  text = f"{start}{s['loss_end']:.4f} nats per token"
  if s["bigram_entropy"] is not None:
    text += f" (bigram entropy of that text: {s['bigram_entropy']:.4f})"
  return text


def _contributors(s: Mapping[str, Any]) -> str:
  if s["contributors_median"] is None:
    return "no merge"
  return (
    f"median {s['contributors_median']:g} of"
    f" {s['learners_live_median']:g} live, {s['num_merges']} merges"
  )


def _realised_h(s: Mapping[str, Any]) -> str:
  values = [h for h in s["realised_h"] if h is not None]
  if not values:
    return "too few merges to say"
  listed = " ".join("-" if h is None else f"{h:.1f}" for h in s["realised_h"])
  return f"{listed}  (configured {s['configured_h']})"


def _share(tokens: float, of: float) -> str:
  share = f"  {tokens / of:.1%}" if of else ""
  return f"{tokens:,.0f}{share}"


def _finite(value: Any) -> Any:
  """JSON has no NaN and no infinity: they become null."""
  if isinstance(value, Mapping):
    return {str(key): _finite(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
