"""A study of simulations: its flags, its cells on some processes, its figures."""

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import multiprocessing
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ddiloco_jax.chaos import studies
from ddiloco_jax.chaos.scenario import Scenario


def read_scenario(path: str, overrides: tuple[str, ...]) -> Scenario:
  """A file of configs/sim/ with overrides, --config.SECTION.NAME=VALUE.

  Raises:
    ValueError: either cannot be.
  """
  # Only here: JAX comes along, and who plays a cell has no use for it.
  from absl import flags as absl_flags

  from ddiloco_jax import config
  from ddiloco_jax.config import strict

  argv = ["simulate", f"--{config.FLAG}={path}", *overrides]
  values = absl_flags.FlagValues()
  try:
    config.define_flag(values, argv, Scenario)
    rest = values(argv)[1:]
  except absl_flags.Error as error:
    raise ValueError(str(error)) from error
  if rest:
    raise ValueError(f"unknown arguments: {' '.join(rest)}; see --help")
  return config.parsed(
    values, lambda cfg: strict.build(Scenario, cfg.to_dict())
  )


def play(
  scenario: Scenario, num_processes: int, console: Console
) -> dict[str, Any]:
  """Plays every cell of a scenario's study; what it says, and from what.

  Raises:
    ValueError: there is no such study.
  """
  study = _study(scenario.run.study)
  cells, played, begun = study.cells(scenario), {}, time.monotonic()
  with Progress(console=console, transient=True) as progress:
    bar = progress.add_task(scenario.run.study, total=len(cells))
    for name, figures in _each(study.play, cells, num_processes):
      played[name] = figures
      progress.advance(bar)
  return {
    "study": scenario.run.study,
    **study.conclude(scenario, played),
    "seconds": round(time.monotonic() - begun, 1),
    "commit": commit(),
    "scenario": dataclasses.asdict(scenario),
  }


def _each(
  play_cell: Callable[[Any], Any], cells: Sequence[Any], num_processes: int
) -> Iterator[tuple[str, Any]]:
  """(Name, figures) of every cell, as they come."""
  if num_processes == 1:
    yield from ((cell[0], play_cell(cell)) for cell in cells)
    return
  spawn = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(num_processes, spawn) as pool:
    names = {pool.submit(play_cell, cell): cell[0] for cell in cells}
    for future in concurrent.futures.as_completed(names):
      yield names[future], future.result()


def commit() -> str:
  """The commit of this program, "-dirty" if files differ; "" if unknown."""
  here = pathlib.Path(__file__).parent
  try:
    return subprocess.run(
      ["git", "describe", "--always", "--dirty", "--abbrev=12"],
      cwd=here,
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return ""


def _study(name: str) -> Any:
  if name not in studies.NAMES:
    raise ValueError(
      f"run.study is {name!r}: it must be one of {', '.join(studies.NAMES)}."
    )
  return importlib.import_module(f"{studies.__name__}.{name}")


def to_text(value: Any, indent: int = 0) -> str:
  """Figures for people, a line each."""
  lines = []
  for key, item in value.items():
    pad = " " * indent
    if isinstance(item, dict):
      lines.append(f"{pad}{key}")
      lines.append(to_text(item, indent + 2))
    elif isinstance(item, float):
      lines.append(f"{pad}{key:<28} {item:.6g}")
    else:
      lines.append(f"{pad}{key:<28} {item}")
  return "\n".join(lines)


def make_parser(about: str | None) -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m ddiloco_jax.cli.simulate",
    description=about,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add("--config", required=True, help="a file of configs/sim/")
  add("--processes", type=int, default=1, help="for its cells (default: 1)")
  add("--json", action="store_true", help="end in a line of JSON on stdout")
  return parser


def to_json(told: dict[str, Any]) -> str:
  return json.dumps(_finite(told), allow_nan=False)


def _finite(value: Any) -> Any:
  """JSON has no infinity: it becomes null."""
  if isinstance(value, dict):
    return {key: _finite(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(item) for item in value]
  is_odd = isinstance(value, float) and value in (float("inf"), -float("inf"))
  return None if is_odd else value
