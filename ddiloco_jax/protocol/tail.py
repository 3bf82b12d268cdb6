"""The end of a tape: what a syncer consumed after what it had made durable.

A killed syncer has written every event to its tape before anybody was told of
what it decided. A restart that steps the machine through them loses no book;
what is rolled back is only what was merged and not made durable.
(arXiv 2604.21428, App.)
"""

import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from ddiloco_jax.protocol import events, machine, saved, tape
from ddiloco_jax.protocol.lines import Head, Step, decode_event, parse
from ddiloco_jax.protocol.state import State

_log = logging.getLogger(__name__)


class CaughtUp(NamedTuple):
  """Where a tape leads to.

  Attributes:
    state: After the last event that counts.
    merged: The merge that was made durable last, if the tape has not come to
      it; else None.
  """

  state: State
  merged: events.Merged | None


class Published(NamedTuple):
  """What learners can have been told of, as a tape says.

  Attributes:
    epoch: The newest on the tape.
    versions: Per fragment, the newest.
    settings: Of the newest epoch.
  """

  epoch: int
  versions: tuple[int, ...]
  settings: dict[str, Any]


def published(path: str | os.PathLike[str]) -> Published | None:
  """Reads what a tape says of versions; None if it has no header.

  Lines that are torn or damaged are left out: nothing is stepped.
  """
  found: Published | None = None
  with open(path, "rb") as file:
    for text in file:
      if b'"type":"Merged"' not in text and not text.startswith(b'{"tape"'):
        continue
      with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
        found = _look(found, parse(text))
  return found


def _look(found: Published | None, values: dict[str, Any]) -> Published | None:
  if "tape" in values:
    versions = [f[0][1] for f in values["start"]["fragments"]]
    return Published(values["epoch"], tuple(versions), values["settings"])
  event = decode_event(values["event"])
  if found is None or not isinstance(event, events.Merged):
    return found
  versions = list(found.versions)
  versions[event.fragment] = event.version.n
  return found._replace(versions=tuple(versions))


def catch_up(
  path: str | os.PathLike[str],
  state: State,
  merged: events.Merged | None = None,
) -> CaughtUp:
  """Steps a durable state through what the tape has after it.

  Args:
    path: The newest tape; it need not be there.
    state: As it was made durable.
    merged: A merge that was made durable with it, and was still under way.

  Returns:
    The state before the first merge that is not durable, or before the first
    line that is torn, damaged, or of another run of the machine.
  """
  found = CaughtUp(state, merged)
  try:
    for later in _walk(pathlib.Path(path), found):
      found = later
  except (OSError, ValueError) as error:
    _log.warning("the end of %s is left out: %s", path, error)
  return found


def _walk(path: pathlib.Path, here: CaughtUp) -> Iterator[CaughtUp]:
  if not path.exists():
    return
  with path.open("rb") as file:
    first = file.readline()
    if not first.endswith(b"\n"):
      return  # A syncer that was killed as it started.
    head = saved.decode(Head, parse(first))
    state, merged = here
    skipped = state.num_events
    if head.epoch > state.epoch:  # It went on from `here`, and merged nothing.
      start = machine.load(head.rules, head.start)
      if _versions(start) != _versions(state, merged):
        return
      state, merged, skipped = start, None, 0
      yield CaughtUp(state, merged)
    elif head.epoch < state.epoch:
      return
    state = state._replace(rules=head.rules)
    for number, text in enumerate(file):
      if number < skipped:
        continue
      stepped = _step(state, merged, text)
      if stepped is None:
        return
      state, merged = stepped
      yield stepped


def _step(
  state: State, merged: events.Merged | None, text: bytes
) -> CaughtUp | None:
  """Steps through one line; None where the tape ends for a restart."""
  if not text.endswith(b"\n"):
    return None
  values = parse(text)
  if "event" not in values:
    return None
  line = saved.decode(Step, values)
  event = decode_event(line.event)
  if isinstance(event, events.Merged):
    name = event.fragment, event.version
    if merged is None or name != (merged.fragment, merged.version):
      return None
    merged = None
  state, effects = machine.step(state, event)
  if tape.digest(effects) != line.digest:
    raise ValueError(
      f"{type(event).__name__} at {event.time:.3f} s decided otherwise than the"
      " tape says"
    )
  return CaughtUp(state, merged)


def _versions(state: State, merged: events.Merged | None = None) -> list[int]:
  versions = [fragment.version.n for fragment in state.fragments]
  if merged is not None:
    versions[merged.fragment] = merged.version.n
  return versions
