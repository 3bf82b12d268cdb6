"""The drawings of a report, each one function from a History to SVG text."""

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from ddiloco_jax.report import summary as summaries
from ddiloco_jax.report.faults import SYNCER, Mark
from ddiloco_jax.report.history import History, Life, Progress

_MAX_POINTS = 400  # Per curve: a report of a long run stays a small file.
_COLORS = (
  "#3b6fb6",
  "#d1702a",
  "#3d8f5f",
  "#a8497f",
  "#7a6bb8",
  "#8a7a2f",
  "#2f8f93",
  "#b5483f",
)
_INK = "#3c4149"
_FAINT = "#d5d8dd"
_GOOD = "#3d8f5f"
_BAD = "#b5483f"
_FAULTS = {
  "kill": _BAD,
  "stop": "#d1702a",
  "partition": "#7a6bb8",
  "slow": "#c9a227",
  "disk": "#22262c",
  "clock": "#2f8f93",
}
_STYLE: dict[Any, Any] = {
  "font.size": 9,
  "font.family": "sans-serif",
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.edgecolor": _FAINT,
  "axes.labelcolor": _INK,
  "axes.grid": True,
  "grid.color": "#eceef1",
  "axes.axisbelow": True,
  "text.color": _INK,
  "xtick.color": _INK,
  "ytick.color": _INK,
  "legend.frameon": False,
  "svg.fonttype": "none",  # Text stays text.
}


def draw_all(
  history: History,
  held_out: Mapping[str, float | None],
  faults: Sequence[Mark] = (),
) -> dict[str, str]:
  """Title -> SVG of every drawing, in the order of reading."""
  drawings: dict[str, tuple[float, Callable[[Axes], None]]] = {
    "Loss": (3.0, lambda ax: draw_loss(ax, history, held_out)),
    "Learners": (
      1.0 + 0.3 * max(2, len(learners_of(history))),
      lambda ax: draw_learners(ax, history, faults),
    ),
    "Contributors per merge": (
      2.2,
      lambda ax: draw_contributors(ax, history),
    ),
    "Realised H per fragment": (2.2, lambda ax: draw_realised_h(ax, history)),
    "Tokens by book": (
      1.0 + 0.3 * max(2, len(_books(history))),
      lambda ax: draw_books(ax, history),
    ),
  }
  return {
    title: to_svg(draw, height, title)
    for title, (height, draw) in drawings.items()
  }


def to_svg(draw: Callable[[Axes], None], height: float, salt: str) -> str:
  """Runs a drawing on axes of its own; `salt` keeps the SVG's ids apart."""
  with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):
    figure = Figure(figsize=(8.4, height), layout="constrained")
    FigureCanvasSVG(figure)
    draw(figure.add_subplot())
    out = io.StringIO()
    metadata = {"Date": None, "Creator": None}
    figure.savefig(out, format="svg", metadata=metadata, transparent=True)
  return out.getvalue()[out.getvalue().index("<svg") :]


def draw_loss(
  ax: Axes, history: History, held_out: Mapping[str, float | None]
) -> None:
  """Training loss of every learner, the held-out loss, the bigram's bar."""
  colors = color_by_learner(history)
  labelled = set()
  for life in history.lives:
    points = smooth([p for p in life.progress if p.loss is not None])
    label = None if life.learner in labelled else f"learner {life.learner}"
    labelled.add(life.learner)
    ax.plot(
      [p.time_s for p in points],
      [p.loss or 0.0 for p in points],
      color=colors[life.learner],
      linewidth=1.1,
      label=label,
    )
  start, end = held_out.get("loss_start"), held_out.get("loss_end")
  if start is not None and end is not None:
    ax.plot(
      [_start(history), history.end_s],
      [start, end],
      "D",
      color=_INK,
      markersize=5,
      clip_on=False,
      label="held-out, global parameters",
    )
  bigram = held_out.get("bigram_entropy")
  if bigram is not None:
    ax.axhline(
      bigram, color=_INK, linestyle=":", linewidth=1, label="bigram entropy"
    )
  ax.set_ylabel("nats per token")
  ax.set_xlabel("seconds since the run began")
  ax.set_xlim(_start(history), _end(history))
  if ax.get_legend_handles_labels()[0]:
    # Above the curves: below, it would hide some of them.
    ax.legend(ncols=4, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))


def draw_learners(
  ax: Axes, history: History, faults: Sequence[Mark] = ()
) -> None:
  """A bar for every life, a cross where one was lost; a storm's faults."""
  rows = {learner: i for i, learner in enumerate(learners_of(history))}
  colors = color_by_learner(history)
  for life in history.lives:
    row = rows[life.learner]
    ax.barh(
      row,
      max(life.end_s - life.start_s, 0.0),
      left=life.start_s,
      height=0.5,
      color=colors[life.learner],
    )
    if faults:  # In a storm, words would cover each other.
      continue
    if life.end == "lost":
      ax.plot(life.end_s, row, "X", color=_BAD, markersize=9, zorder=3)
      ax.annotate(
        f"lost at {life.end_s:.0f} s",
        (life.end_s, row),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=_BAD,
      )
    if is_return(life, history):
      ax.annotate(
        f"back at {life.start_s:.0f} s",
        (life.start_s, row),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color="white",
      )
  ax.set_yticks(range(len(rows)), [f"learner {name}" for name in rows])
  ax.set_ylim(len(rows) - 0.4, -0.6)
  ax.grid(axis="y", visible=False)
  ax.set_xlabel("seconds since the run began")
  ax.set_xlim(_start(history), _end(history))
  _mark_faults(ax, rows, faults)


def _mark_faults(
  ax: Axes, rows: Mapping[str, int], faults: Sequence[Mark]
) -> None:
  """A thin bar under the learner for each; a line where the syncer died."""
  for mark in faults:
    if mark.process == SYNCER:
      ax.axvline(mark.start_s, color=_BAD, linewidth=1.2, linestyle="--")
    elif mark.process in rows:
      ax.barh(
        rows[mark.process] + 0.36,
        mark.end_s - mark.start_s,
        left=mark.start_s,
        height=0.16,
        color=_FAULTS.get(mark.kind, _INK),
        zorder=3,
      )
      if mark.kind == "kill":
        where = mark.start_s, rows[mark.process]
        ax.plot(*where, "X", color=_BAD, markersize=6, zorder=4)
  learners = [mark for mark in faults if mark.process != SYNCER]
  handles: list[Any] = [
    Patch(color=color, label=kind)
    for kind, color in _FAULTS.items()
    if any(mark.kind == kind for mark in learners)
  ]
  if len(learners) < len(faults):
    handles.append(
      Line2D([], [], color=_BAD, linestyle="--", label="syncer killed")
    )
  if handles:
    ax.legend(
      handles=handles,
      ncols=len(handles),
      fontsize=8,
      loc="lower left",
      bbox_to_anchor=(0, 1),
    )


def draw_contributors(ax: Axes, history: History) -> None:
  """How many replies each merge had, under how many learners were live."""
  times = [m.time_s for m in history.merges]
  ax.step(
    times,
    [m.num_live for m in history.merges],
    where="post",
    color=_FAINT,
    linewidth=2,
    label="live",
  )
  ax.plot(
    times,
    [len(m.contributors) for m in history.merges],
    ".",
    color=_COLORS[0],
    markersize=4,
    label="contributing",
  )
  most = max([1, *(m.num_live for m in history.merges)])
  ax.set_ylim(0, most + 0.4)
  ax.yaxis.set_major_locator(MaxNLocator(integer=True))
  ax.set_xlim(_start(history), _end(history))
  ax.set_xlabel("seconds since the run began")
  ax.set_ylabel("learners")
  if history.merges:
    ax.legend(ncols=2, fontsize=8, loc="lower right")


def draw_realised_h(ax: Axes, history: History) -> None:
  """Steps between merges as they were, against the configured H."""
  configured = history.cycle_steps
  values = [0.0 if h is None else h for h in history.realised_h]
  allowed = max(0.2 * configured, 3.0)
  inside = [abs(h - configured) <= allowed for h in values]
  ax.axhspan(
    configured - allowed, configured + allowed, color="#eef4f0", zorder=0
  )
  ax.axhline(
    configured,
    color=_INK,
    linestyle=":",
    linewidth=1,
    label=f"configured, {configured}",
  )
  ax.bar(
    range(len(values)),
    values,
    width=0.6,
    color=[_GOOD if ok else _COLORS[1] for ok in inside],
  )
  ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  ax.grid(axis="x", visible=False)
  ax.set_xlabel("fragment")
  ax.set_ylabel("steps")
  ax.set_ylim(0, 1.25 * max(configured + allowed, *values, 0.0))
  ax.legend(fontsize=8, loc="upper right")


def draw_books(ax: Axes, history: History) -> None:
  """Where every reported token went."""
  books = _books(history)
  total = history.books.get("reported", 0.0) or 1.0
  for row, (name, tokens) in enumerate(books.items()):
    color = _GOOD if name == "merged" else _BAD
    color = _COLORS[0] if name == "pending" else color
    ax.barh(row, tokens, height=0.55, color=color)
    ax.annotate(
      f"{tokens:,.0f}  ({tokens / total:.1%})",
      (tokens, row),
      xytext=(4, 0),
      textcoords="offset points",
      va="center",
      fontsize=8,
    )
  ax.set_yticks(range(len(books)), list(books))
  ax.set_ylim(len(books) - 0.4, -0.6)
  ax.set_xlim(0, 1.2 * max([1.0, *books.values()]))
  ax.grid(axis="y", visible=False)
  ax.xaxis.set_major_formatter(EngFormatter(sep=""))
  ax.set_xlabel("tokens")


def learners_of(history: History) -> list[str]:
  """Learner ids, numbers in numeric order."""
  ids = {life.learner for life in history.lives}
  return sorted(ids, key=lambda x: (not x.isdecimal(), x.zfill(8)))


def color_by_learner(history: History) -> dict[str, str]:
  return {
    learner: _COLORS[i % len(_COLORS)]
    for i, learner in enumerate(learners_of(history))
  }


def is_return(life: Life, history: History) -> bool:
  return any(
    other.learner == life.learner and other.incarnation < life.incarnation
    for other in history.lives
  )


def smooth(points: list[Progress]) -> list[Progress]:
  """At most _MAX_POINTS points, each the mean of its neighbours."""
  size = max(1, -(-len(points) // _MAX_POINTS), len(points) // 60)
  groups = [points[i : i + size] for i in range(0, len(points), size)]
  return [
    Progress(
      statistics.fmean(p.time_s for p in group),
      group[-1].step,
      statistics.fmean(p.loss for p in group if p.loss is not None),
    )
    for group in groups
  ]


def _books(history: History) -> dict[str, float]:
  """Merged, pending, and every reason to discard that was ever used."""
  lost = {
    name: tokens
    for name, tokens in summaries.discarded(history.books).items()
    if tokens
  }
  return {
    "merged": history.books.get("merged", 0.0),
    "pending": history.books.get("pending", 0.0),
    **lost,
  }


def _start(history: History) -> float:
  """Nothing is to be seen before the first learner was there."""
  return min((life.start_s for life in history.lives), default=0.0)


def _end(history: History) -> float:
  ends = [life.end_s for life in history.lives]
  return max([_start(history) + 1.0, history.end_s, *ends])
