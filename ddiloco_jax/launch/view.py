"""How a run stands, for people: a table for a terminal, a line for a log."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import Message
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ddiloco_jax.wire.pb import synchronizer_pb2 as pb

# Order of the books in the footer; the rest are reasons to discard.
_BOOKS = ("reported", "merged", "pending")


def render(
  status: pb.Status | None, processes: Mapping[str, str] | None = None
) -> RenderableType:
  """The live table.

  Args:
    status: As the syncer serves it; None before it was reached.
    processes: Learner id -> what its process does, where one launched them.
  """
  processes = processes or {}
  if status is None:
    return Group(
      Text("The syncer starts."), _learner_table({}, processes), Text("")
    )
  learners = {each.learner_id: each for each in status.learners}
  return Group(
    Text(headline(status), style="bold"),
    Text(f"now: {status.waiting_for}"),
    _learner_table(learners, processes),
    Text(merges_line(status)),
    Text(tokens_line(status)),
    *(Text(f"alarm: {alarm}", style="red") for alarm in status.alarms),
  )


def one_line(status: pb.Status | None) -> str:
  """The same for a log: one line."""
  if status is None:
    return "the syncer starts"
  losses = [
    f"{each.learner_id}: {each.metrics['loss']:.3f}"
    for each in sorted_learners(status.learners)
    if each.live and "loss" in each.metrics
  ]
  parts = [
    headline(status),
    f"loss {', '.join(losses)}" if losses else "",
    merges_line(status),
    f"now: {status.waiting_for}",
  ]
  return " | ".join(part for part in parts if part)


def to_dict(message: Message) -> dict[str, Any]:
  """A message as strict JSON values: numbers stay numbers, nothing is left out.

  A number that is not finite, such as a diverged loss, becomes None.
  """
  return {
    field.name: _to_json(getattr(message, field.name))
    for field in message.DESCRIPTOR.fields
  }


def _to_json(value: Any) -> Any:
  if isinstance(value, Message):
    return to_dict(value)
  if isinstance(value, Mapping):
    return {str(key): _to_json(item) for key, item in value.items()}
  if isinstance(value, str | int):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  return [_to_json(item) for item in value]


def headline(status: pb.Status) -> str:
  """t, phase and the four figures of membership."""
  of = f"/{status.num_syncer_steps}" if status.num_syncer_steps else ""
  text = (
    f"t {status.t}{of} {status.phase}"
    f" | {status.num_live} live, {status.num_training} training,"
    f" {status.num_eligible} eligible, {status.num_contributing} contributing"
  )
  if status.step_s:
    text += f" | {status.step_s:.2f} s a step"
  if status.eta_s:
    text += f" | {_duration(status.eta_s)} to go"
  return text


def merges_line(status: pb.Status) -> str:
  """How many merges, and the realised H so far."""
  num = sum(each.version.n for each in status.fragments)
  known = [each.realised_h for each in status.fragments if each.realised_h]
  text = f"{num} merges over {len(status.fragments)} fragments"
  if known:
    text += f", realised H {sum(known) / len(known):.1f}"
  return text


def tokens_line(status: pb.Status) -> str:
  """Tokens by book."""
  books = {book.name: book.tokens for book in status.books}
  shown = [f"{name} {books.get(name, 0.0):,.0f}" for name in _BOOKS]
  shown += [
    f"{name.removeprefix('discarded/')} {tokens:,.0f}"
    for name, tokens in books.items()
    if name not in _BOOKS and tokens
  ]
  return "tokens: " + ", ".join(shown)


def sorted_learners(
  learners: Iterable[pb.LearnerStatus],
) -> list[pb.LearnerStatus]:
  """Learners by id, numbers in numeric order."""
  return sorted(learners, key=lambda each: sort_key(each.learner_id))


def sort_key(learner_id: str) -> tuple[bool, str]:
  return not learner_id.isdecimal(), learner_id.zfill(8)


def _learner_table(
  learners: Mapping[str, pb.LearnerStatus], processes: Mapping[str, str]
) -> Table:
  table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
  for name in ("learner", *(("process",) if processes else ())):
    table.add_column(name)
  for name in ("live", "training", "contributing"):
    table.add_column(name, justify="center")
  for name in ("step", "loss", "tok/s"):
    table.add_column(name, justify="right", min_width=6)
  table.add_column("note", overflow="fold")
  for name in sorted({*learners, *processes}, key=sort_key):
    process = (processes.get(name, ""),) if processes else ()
    table.add_row(name, *process, *_cells(learners.get(name)))
  return table


def _cells(learner: pb.LearnerStatus | None) -> tuple[str | Text, ...]:
  if learner is None:
    return ("", "", "", "", "", "", "has not joined yet")
  metrics = learner.metrics
  return (
    _mark(learner.live),
    _mark(learner.training),
    _mark(learner.contributing),
    str(learner.step),
    f"{metrics['loss']:.4f}" if "loss" in metrics else "",
    _tokens_per_s(learner),
    Text(learner.note),  # A learner's words are no markup.
  )


def _mark(value: bool) -> Text:
  return Text("yes", "green") if value else Text("no", "red")


def _tokens_per_s(learner: pb.LearnerStatus) -> str:
  metrics = learner.metrics
  if "tokens_per_s" in metrics:
    return f"{metrics['tokens_per_s']:,.0f}"
  if learner.step_s and "num_tokens" in metrics:
    return f"{metrics['num_tokens'] / learner.step_s:,.0f}"
  return ""


def _duration(seconds: float) -> str:
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours} h {minutes:02d} min"
  return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
