"""One self-contained report.html: figures inline, nothing fetched."""

import html
import pathlib
from collections.abc import Mapping
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #3c4149; margin: 0;
  background: #f6f7f9; }}
main {{ max-width: 54rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }}
h1 {{ font-size: 1.35rem; margin: 0; }}
h2 {{ font-size: 1rem; margin: 0 0 .5rem; }}
p {{ margin: .2rem 0 1rem; color: #6a707a; }}
section {{ background: #fff; border: 1px solid #e6e8ec; border-radius: 8px;
  padding: 1rem; margin-top: 1rem; }}
section svg {{ width: 100%; height: auto; display: block; }}
.cards {{ display: grid; gap: .75rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }}
.card {{ background: #fff; border: 1px solid #e6e8ec; border-radius: 8px;
  padding: .7rem .9rem; }}
.card b {{ display: block; font-size: 1.25rem; color: #22262c;
  font-variant-numeric: tabular-nums; }}
.card span {{ font-size: .8rem; color: #6a707a; }}
pre {{ margin: 0; white-space: pre-wrap; font-size: .8rem; }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{ending}</p>
<div class="cards">
{cards}
</div>
{sections}
<section><h2>Summary</h2><pre>{text}</pre></section>
</main>
</body>
</html>
"""


def write_page(
  summary: Mapping[str, Any],
  text: str,
  figures: Mapping[str, str],
  path: pathlib.Path,
) -> None:
  """Writes the report.

  Args:
    summary: As `summary.summarise` makes it.
    text: The same as lines.
    figures: Title -> SVG.
    path: Of the file to write.
  """
  cards = "\n".join(
    f'<div class="card"><b>{html.escape(value)}</b>'
    f"<span>{html.escape(label)}</span></div>"
    for label, value in _cards(summary)
  )
  sections = "\n".join(
    f"<section><h2>{html.escape(title)}</h2>\n{svg}</section>"
    for title, svg in figures.items()
  )
  page = _PAGE.format(
    title=html.escape(f"Run {summary['run_id']}"),
    ending=html.escape(summary["ending"] or "The tape stops before an end."),
    cards=cards,
    sections=sections,
    text=html.escape(text),
  )
  path.write_text(page, encoding="utf-8")


def _cards(s: Mapping[str, Any]) -> list[tuple[str, str]]:
  known = [h for h in s["realised_h"] if h is not None]
  mean_h = f"{sum(known) / len(known):.1f}" if known else None
  processed = s["tokens_processed"]
  merged = s["tokens_merged"] / processed if processed else None
  cards = [
    ("held-out loss at the start", _text(s["loss_start"], "{:.3f}")),
    ("held-out loss at the end", _text(s["loss_end"], "{:.3f}")),
    ("uptime", _text(s["uptime"], "{:.1%}")),
    (
      "contributors, median merge",
      _text(s["contributors_median"], "{:g}"),
    ),
    ("merges", str(s["num_merges"])),
    (f"realised H, configured {s['configured_h']}", mean_h or "-"),
    ("tokens processed", f"{processed:,.0f}"),
    ("of them merged", _text(merged, "{:.1%}")),
  ]
  return cards


def _text(value: float | None, form: str) -> str:
  return "-" if value is None else form.format(value)
