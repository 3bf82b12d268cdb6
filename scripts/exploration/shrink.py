"""A schedule that breaks a law, made as short as it gets, and told as a list.

Delta debugging over the choices (Zeller and Hildebrandt, 2002): any part of a
schedule is a schedule.
"""

from collections.abc import Callable

from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.events import Counts, Effect, Event, Version

from . import world
from .laws import Broken, Laws
from .schedule import Choice, Schedule

_MAX_TRIES = 3000


def broken(schedule: Schedule) -> Broken | None:
  """What a schedule breaks, if anything."""
  try:
    world.run(schedule, Laws())
  except Broken as error:
    return error
  return None


def shrink(schedule: Schedule, law: str) -> Schedule:
  """The shortest schedule found that breaks the same law.

  Args:
    schedule: Breaks it.
    law: Its name.
  """
  tries = 0

  def breaks(choices: tuple[Choice, ...]) -> bool:
    nonlocal tries
    tries += 1
    error = broken(schedule._replace(choices=choices))
    return error is not None and error.law == law

  choices = _minimal(schedule.choices, breaks, lambda: tries > _MAX_TRIES)
  choices = _plain(choices, breaks, lambda: tries > _MAX_TRIES)
  return schedule._replace(choices=choices)


def _minimal(
  choices: tuple[Choice, ...],
  breaks: Callable[[tuple[Choice, ...]], bool],
  is_enough: Callable[[], bool],
) -> tuple[Choice, ...]:
  """Leaves out ever smaller parts, as long as the rest breaks the law."""
  size = max(1, len(choices) // 2)
  while True:
    start, found = 0, False
    while start < len(choices) and not is_enough():
      rest = choices[:start] + choices[start + size :]
      if breaks(rest):
        choices, found = rest, True
      else:
        start += size
    if (size == 1 and not found) or is_enough():
      return choices
    size = size if found else max(1, size // 2)


def _plain(
  choices: tuple[Choice, ...],
  breaks: Callable[[tuple[Choice, ...]], bool],
  is_enough: Callable[[], bool],
) -> tuple[Choice, ...]:
  """Makes numbers small where that changes nothing."""
  for i, choice in enumerate(choices):
    for number in (0, 1, 2, choice.number % 1024, choice.number % 2**20):
      if is_enough():
        return choices
      if number >= choice.number:
        continue
      fresh = (*choices[:i], choice._replace(number=number), *choices[i + 1 :])
      if breaks(fresh):
        choices = fresh
        break
  return choices


def trace(schedule: Schedule) -> list[str]:
  """One line per event, with what the machine decided below it."""
  lines: list[str] = []

  def record(event: Event, effects: tuple[Effect, ...]) -> None:
    lines.append(f"{event.time:8.2f} {_told(event)}")
    lines.extend(f"           -> {_told(effect)}" for effect in effects)

  def restored(text: str) -> None:
    lines.append(text)

  try:
    world.run(schedule, Laws(), record, restored)
  except Broken as error:
    lines.append(f"BROKEN: {error}")
  return lines


def _told(value: Event | Effect) -> str:
  fields = {
    name: item
    for name, item in events.to_dict(value).items()
    if name not in ("type", "time") and item not in ("", (), None, False)
  }
  if not isinstance(value, events.GiveUp | events.Alarm | events.Resolved):
    fields.pop("reason", None)
  words = ", ".join(f"{name}={_short(item)}" for name, item in fields.items())
  return f"{type(value).__name__}({words})"


def _short(item) -> str:
  if isinstance(item, Version):
    return f"v{item.n}e{item.epoch}"
  if isinstance(item, Counts):
    return f"{item.steps}/{item.tokens}"
  if isinstance(item, str):
    return str(item)
  if isinstance(item, tuple) and hasattr(item, "_fields"):
    return f"({' '.join(map(_short, item))})"
  if isinstance(item, tuple):
    return f"[{', '.join(map(_short, item))}]"
  return f"{item}"
