"""Effects of the machine as notices for learners."""

from collections.abc import Iterator

from ddiloco_jax.protocol import events
from ddiloco_jax.wire import port

Addressed = tuple[str, int, port.Notice]  # learner, incarnation, what to say


def addressed(effect: events.Effect) -> Iterator[Addressed]:
  """The notices that an effect sends to particular learners."""
  match effect:
    case events.Pull():
      notice = port.PullNotice(
        fragment=effect.fragment, round=effect.round, attempt=effect.attempt
      )
      yield effect.learner, effect.incarnation, notice
    case events.Shards():
      notice = port.ShardsNotice(positions=effect.positions)
      yield effect.learner, effect.incarnation, notice
    case events.Publish():
      for receiver in effect.receivers:
        notice = port.PublishedNotice(
          fragment=effect.fragment,
          version=effect.version,
          outcome=receiver.outcome,
          reason=receiver.reason,
          round=receiver.round,
          attempt=receiver.attempt,
          exact=effect.exact,
        )
        yield receiver.learner, receiver.incarnation, notice
    case events.Marker():
      marker = port.MarkerNotice(snapshot=effect.snapshot, clock=effect.clock)
      for learner, incarnation in effect.members:
        yield learner, incarnation, marker
    case events.GiveUp():
      notice = port.GivenUpNotice(
        fragment=effect.fragment,
        round=effect.round,
        attempt=effect.attempt,
        reason=effect.reason,
      )
      for receiver in effect.receivers:
        yield receiver.learner, receiver.incarnation, notice


def to_all(effect: events.Effect) -> port.Notice | None:
  """The notice that an effect sends to every learner, if it does."""
  match effect:
    case events.Ending():
      return port.EndingNotice(reason=effect.reason)
    case events.Finished():
      return port.FinishedNotice(
        reason=effect.reason, exit_code=effect.exit_code
      )
  return None
