"""What was published and is not on disk any more: never in silence."""

import logging
import pathlib
from collections.abc import Sequence

from ddiloco_jax.protocol.tail import Published

_log = logging.getLogger(__name__)


def check(
  path: pathlib.Path,
  versions: Sequence[int],
  doubts: Sequence[str],
  end: str,
  published: Published | None,
  accept_loss: bool,
) -> None:
  """Refuses to go on from less than was published.

  Args:
    path: The run's directory.
    versions: Restored, per fragment.
    doubts: Sentences: what of the journal is damaged, and not restored.
    end: A sentence: where the journal ends.
    published: What the newest tape says.
    accept_loss: Only log it.

  Raises:
    ValueError: what is lost, why, and the ways on.
  """
  told = versions if published is None else published.versions
  lost = [
    f"version {n + 1}{f' to {m}' if m > n + 1 else ''} of fragment {p}"
    for p, (n, m) in enumerate(zip(versions, told))
    if m > n
  ]
  if not lost and not doubts:
    return
  what = ", ".join(lost) or f"commits after merge {sum(versions)}, if any,"
  said = f"{what} of the run in {path} would be lost"
  why = "; ".join(doubts)
  if published is not None and _may_roll_back(published, doubts):
    _log.warning("%s, as its settings have it. %s", said, why)
    return
  if not why:
    why = f"the newest tape has them, and {path / 'journal'} does not: {end}"
  if accept_loss:
    _log.warning("%s (%s); run.accept_loss: going on without", said, why)
    return
  raise ValueError(
    f"{said}, which learners can have been told of: {why}. Bring the files back"
    " from a copy, or go on without what is lost, as after a rollback:"
    " --config.run.accept_loss=True. Nothing was changed."
  )


def _may_roll_back(published: Published, doubts: Sequence[str]) -> bool:
  """Whether the settings let a version be published that is not on disk."""
  run = published.settings.get("run", {})
  if run.get("durability") == "snapshot":
    return True
  return run.get("on_write_error") == "continue" and not doubts
