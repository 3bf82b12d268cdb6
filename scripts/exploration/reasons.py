"""Every reason that the protocol can give, read from its text; which were given.

A reason is a sentence with places for numbers and names: an f-string of a module
that decides. One that no schedule reaches is code that no test has seen.
"""

import ast
import collections
import inspect
import re
from types import ModuleType
from typing import Any

from ddiloco_jax.protocol import (
  ending,
  events,
  guards,
  joining,
  machine,
  membership,
  possible,
  publishing,
  recovery,
  replies,
  rounds,
  schedule,
  shards,
  snapshots,
  uploads,
)
from ddiloco_jax.protocol.state import State

# The modules that decide; `status` tells, `check` refuses before the machine.
DECIDING = (
  ending,
  guards,
  joining,
  machine,
  membership,
  possible,
  publishing,
  recovery,
  replies,
  rounds,
  schedule,
  shards,
  snapshots,
  uploads,
)
_NUMBER = re.compile(r"-?\d[\d.e+-]*|\binf\b|\bnan\b")


def sentences(modules: tuple[ModuleType, ...] = DECIDING) -> dict[str, str]:
  """Sentence, its places as `{}` -> the regular expression of it."""
  found = {}
  for module in modules:
    tree = ast.parse(inspect.getsource(module))
    for node in _texts(tree):
      parts = _parts(node)
      if sum(len(part) for part in parts if part) >= 8 and any(
        part and " " in part.strip() for part in parts
      ):
        shown = "".join("{}" if part is None else part for part in parts)
        pattern = "".join(
          ".*?" if part is None else re.escape(part) for part in parts
        )
        found[shown] = pattern
  return found


def counters(modules: tuple[ModuleType, ...] = DECIDING) -> tuple[str, ...]:
  """The names that the machine counts under, as far as they are written out."""
  names = set()
  for module in modules:
    for node in ast.walk(ast.parse(inspect.getsource(module))):
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
          if node.func.attr == "count":
            names.add(first.value)
          elif node.func.attr == "alarm":
            names.add(f"alarm/{first.value}")
  return tuple(sorted(names))


def _texts(tree: ast.AST) -> list[ast.expr]:
  """String expressions, but for docstrings and what an error or assert says."""
  found, todo = [], [tree]
  while todo:
    node = todo.pop()
    if isinstance(node, ast.Raise | ast.Assert):
      continue
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
      continue
    if isinstance(node, ast.JoinedStr) or (
      isinstance(node, ast.Constant) and isinstance(node.value, str)
    ):
      found.append(node)
      continue
    todo.extend(ast.iter_child_nodes(node))
  return found


def _parts(node: Any) -> list[str | None]:
  """The text of a string, with None for each place."""
  if isinstance(node, ast.Constant):
    return [str(node.value)]
  return [
    str(part.value) if isinstance(part, ast.Constant) else None
    for part in node.values
  ]


class Reached:
  """Counts which reasons and counters were seen."""

  def __init__(self):
    self._patterns = [
      (shown, re.compile(pattern, re.DOTALL))
      for shown, pattern in sentences().items()
    ]
    self._known: dict[str, tuple[str, ...]] = {}
    self.counts: collections.Counter[str] = collections.Counter(
      {shown: 0 for shown, _ in self._patterns}
    )
    self.counts.update({f"counter {name}": 0 for name in counters()})

  def note(self, effect: events.Effect) -> None:
    """Counts the reasons that an effect carries."""
    self._note(effect.reason)
    if isinstance(effect, events.Publish | events.GiveUp):
      for reason in {r.reason for r in effect.receivers}:
        if reason:
          self._note(reason)
    elif isinstance(effect, events.SnapshotOver):
      for text in effect.skipped:
        self._note(text)

  def note_state(self, state: State) -> None:
    """Counts what a schedule has led to."""
    for name, num in state.counters.items():
      self.counts[f"counter {name}"] += num
    for learner in state.learners.values():
      if learner.recovered:
        self._note(learner.recovered)

  def _note(self, reason: str) -> None:
    shape = _NUMBER.sub("0", reason)
    known = self._known.get(shape)
    if known is None:
      known = tuple(
        s for s, pattern in self._patterns if pattern.search(reason)
      )
      if len(self._known) < 50_000:
        self._known[shape] = known
    for shown in known:
      self.counts[shown] += 1
