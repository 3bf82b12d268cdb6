"""What a syncer's run says of itself: lines of its metrics, waits in its log."""

import logging
import time
from typing import Any

from ddiloco_jax.protocol import events
from ddiloco_jax.syncer.syncer import Syncer

_log = logging.getLogger(__name__)
_SAY_WAIT_S = 2.0  # A wait that lasts as long is logged.


class WaitLog:
  """Logs what a run waits for, once it has waited for a while."""

  def __init__(self, syncer: Syncer):
    self._syncer = syncer
    self._looked_at = self._since = time.monotonic()
    self._sentence, self._is_said = "", True

  def __call__(self) -> None:
    now = time.monotonic()
    if now - self._looked_at < _SAY_WAIT_S / 2:
      return
    self._looked_at = now
    sentence = self._syncer.status().waiting_for
    if sentence != self._sentence:
      self._sentence, self._since, self._is_said = sentence, now, False
    elif not self._is_said and now - self._since >= _SAY_WAIT_S:
      _log.info("what the run waits for: %s", sentence)
      self._is_said = True


def metrics_line(effect: events.Effect) -> dict[str, Any] | None:
  """The line of metrics.jsonl for an effect that is worth one."""
  match effect:
    case events.Publish(exact=False) if effect.receivers:
      included = [
        r.learner
        for r in effect.receivers
        if r.outcome == events.Outcome.INCLUDED
      ]
      return {
        "what": "publish",
        "fragment": effect.fragment,
        "n": effect.version.n,
        "contributors": included,
        "reason": effect.reason,
      }
    case events.SnapshotOver():
      return {
        "what": "snapshot",
        "snapshot": effect.snapshot,
        "learners": effect.learners,
        "skipped": effect.skipped,
        "reason": effect.reason,
      }
    case events.GiveUp() | events.Alarm() | events.Ending() | events.Finished():
      return {"what": type(effect).__name__.lower(), "reason": effect.reason}
  return None
