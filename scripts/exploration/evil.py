"""What no honest learner says: forged, absurd, foreign, late.

Each word goes by the service's check, as on the wire, and then to the machine.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.events import Counts, Position, Version

if TYPE_CHECKING:
  from .process import Process
  from .world import World

_NORMS = (math.nan, math.inf, 1e30, 1e7, 0.0)
_COUNTS = (
  Counts(0, 0),
  Counts(0, 100),
  Counts(3, 0),
  Counts(2**53, 2**53),
  Counts(1, 100),
  Counts(1, 2**32),
  Counts(1, 2**40),
)


def speak(world: "World", process: "Process", number: int) -> None:
  """One malicious word of a process that was admitted."""
  if not process.incarnation:
    return
  kinds = tuple(_WORDS)
  word = _WORDS[kinds[number % len(kinds)]]
  word(world, process, number // len(kinds))


def speak_as_ghost(world: "World", ghost: "Process", number: int) -> None:
  """The next word of a process that may be over, in the same epoch."""
  act = number % 4
  if act == 0 and ghost.pushes:
    world.say(ghost.pushes.pop().reply, honest=False)
  elif act == 1 and ghost.last_reply:
    world.say(ghost.last_reply, honest=False)
  elif act == 2:
    _forged(world, ghost, number // 4, ghost.incarnation)
  elif not world.deliver_ghost(ghost):
    _report(world, ghost, number // 4)


def _reply(world: "World", process: "Process", number: int, **odd: Any) -> None:
  """Answers the newest pull, or an older one, with something odd in it."""
  p = number % world.rules.num_fragments
  pull = process.pulls.get(p)
  base = world.state.fragments[p].version
  if process.bases[p] is not None:
    base = process.bases[p]
  known = world.state.learners.get(process.name)
  asked = known.asked if known and pull is None else ()
  round_, attempt = (pull.round, pull.attempt) if pull else (number % 9, 0)
  if asked:
    p, round_, attempt = asked[0][:3]
    base = process.bases[p] or base
  fields: dict[str, Any] = {
    "base": base,
    "counts": Counts(1, 100),
    "norm": 1.0,
    "lr_sum": 1.0,
    **odd,
  }
  if callable(fields["base"]):
    fields["base"] = fields["base"](base)
  event = events.Replied(
    learner=process.name,
    incarnation=process.incarnation,
    fragment=p,
    round=round_,
    attempt=attempt,
    **fields,
  )
  world.lie(event)


def _norm(world: "World", process: "Process", number: int) -> None:
  norm = _NORMS[number % len(_NORMS)]
  _reply(world, process, number // len(_NORMS), norm=norm)


def _old_base(world: "World", process: "Process", number: int) -> None:
  back = 1 + number % 3

  def older(base: Version) -> Version:
    return Version(base.epoch, max(0, base.n - back))

  _reply(world, process, number // 3, base=older)


def _foreign_base(world: "World", process: "Process", number: int) -> None:
  """From the future, or of another epoch."""
  ahead, epoch = number % 4, number // 4 % 3

  def foreign(base: Version) -> Version:
    return Version(max(0, base.epoch + epoch - 1), base.n + ahead)

  _reply(world, process, number // 12, base=foreign)


def _odd_counts(world: "World", process: "Process", number: int) -> None:
  counts = _COUNTS[number % len(_COUNTS)]
  _reply(world, process, number // len(_COUNTS), counts=counts)


def _odd_positions(world: "World", process: "Process", number: int) -> None:
  shard, far = number % world.rules.num_shards, (3, 10**4, 2**50)[number % 3]
  positions = (Position(shard, far),)
  _reply(world, process, number // 4, positions=positions)


def _not_asked(world: "World", process: "Process", number: int) -> None:
  world.lie(
    events.Replied(
      learner=process.name,
      incarnation=process.incarnation,
      fragment=number % world.rules.num_fragments,
      round=number // 5 % 40,
      attempt=number % 3,
      base=Version(world.state.epoch, 0),
      counts=Counts(1, 10),
      norm=1.0,
    ),
  )


def _stranger(world: "World", process: "Process", number: int) -> None:
  incarnation = process.incarnation + (-1, 1, 100)[number % 3]
  _forged(world, process, number // 3, incarnation)


def _forged(
  world: "World", process: "Process", number: int, incarnation: int
) -> None:
  """Words with an incarnation that is not, or no longer, the current one."""
  where: dict[str, Any] = {
    "learner": process.name,
    "incarnation": incarnation,
  }
  p = number // 8 % world.rules.num_fragments
  version = world.state.fragments[p].version
  at: dict[str, Any] = {
    "fragment": p,
    "round": number // 64 % 9,
    "attempt": 0,
  }
  known = world.state.learners.get(process.name)
  if known and known.asked:
    at = dict(zip(("fragment", "round", "attempt"), known.asked[0][:3]))
  words: tuple[Callable[[], events.Event], ...] = (
    lambda: events.Heard(**where),
    lambda: events.Left(**where, reason="forged"),
    lambda: events.Disconnected(**where),
    lambda: events.Pushing(**where, **at, num_bytes=number % 4),
    lambda: events.PushBroken(**where, **at, reason="forged"),
    lambda: events.Applied(
      **where, fragment=p, version=version, step=number % 20
    ),
    lambda: events.Replied(
      **where,
      **at,
      base=version,
      counts=Counts(1, 100),
      norm=1.0,
      lr_sum=1.0,
    ),
  )
  world.lie(words[number % len(words)]())


def _report(world: "World", process: "Process", number: int) -> None:
  num = world.rules.num_fragments
  step = max(0, process.step + number % 5 - 1)
  counts = Counts(number // 5 % 4, number // 20 % 300)
  shard = number % world.rules.num_shards
  returned = (Position(shard, number >> 5 & 63),) if number >> 4 & 1 else ()
  world.lie(
    events.Reported(
      learner=process.name,
      incarnation=process.incarnation,
      step=step,
      counts=(counts,) * num,
      positions=(Position(number % (world.rules.num_shards + 1), step),),
      returned=returned,
      waiting=number >> 12 & 7 == 7,
    ),
  )


def _apply(world: "World", process: "Process", number: int) -> None:
  p = number % world.rules.num_fragments
  version = world.state.fragments[p].version
  n = max(0, version.n + (0, -1, -2, 1)[number // 4 % 4])
  epoch = max(0, version.epoch - number // 16 % 2)
  world.lie(
    events.Applied(
      learner=process.name,
      incarnation=process.incarnation,
      fragment=p,
      version=Version(epoch, n),
      step=number % 30,
      counts=Counts(number % 3, number % 200),
      exact=bool(number >> 9 & 1),
    ),
  )


def _push(world: "World", process: "Process", number: int) -> None:
  at: dict[str, Any] = {
    "fragment": number % world.rules.num_fragments,
    "round": 0,
  }
  known = world.state.learners.get(process.name)
  if known and known.asked and number & 64:
    at = dict(zip(("fragment", "round"), known.asked[0][:2]))
  world.lie(
    events.Pushing(
      learner=process.name,
      incarnation=process.incarnation,
      **at,
      attempt=0,
      num_bytes=number // 8 % 8,
    ),
  )


def _hello(world: "World", process: "Process", number: int) -> None:
  """With a nonce that another process had, or bases that cannot be."""
  nonce = f"n{number % (len(world.processes) + 1)}"
  num = world.rules.num_fragments
  bases = tuple(
    Version(number // 7 % (world.state.epoch + 1), number // 11 % 7 + p)
    for p in range(num)
  )
  world.pretend(
    process,
    events.Joined(
      learner=process.name,
      nonce=nonce,
      takeover=bool(number >> 8 & 1),
      bases=bases if number >> 9 & 1 else (),
    ),
  )


def _merged(world: "World", process: "Process", number: int) -> None:
  """The worker speaks of a merge that nobody asked for, or once more."""
  p = number % world.rules.num_fragments
  version = world.state.fragments[p].version
  open_ = [r.round for r in world.state.rounds if r.fragment == p]
  world.lie(
    events.Merged(
      fragment=p,
      round=10**6 if world.merges or not open_ else open_[0],
      version=version._replace(n=version.n + number // 4 % 4),
    ),
  )


def _saved(world: "World", process: "Process", number: int) -> None:
  """Of a cut whose clock it may not hold, or of another one."""
  cut = world.state.cut
  world.lie(
    events.MarkerDone(
      learner=process.name,
      incarnation=process.incarnation,
      snapshot=cut.snapshot if cut else number % 3,
      saved=bool(number % 4),
    )
  )


_WORDS: dict[str, Callable[["World", "Process", int], None]] = {
  "norm": _norm,
  "old base": _old_base,
  "foreign base": _foreign_base,
  "odd counts": _odd_counts,
  "odd positions": _odd_positions,
  "not asked": _not_asked,
  "stranger": _stranger,
  "report": _report,
  "apply": _apply,
  "push": _push,
  "hello": _hello,
  "merged": _merged,
  "saved": _saved,
}
