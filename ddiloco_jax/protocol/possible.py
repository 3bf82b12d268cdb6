"""Counts and data positions that cannot be, by what their process said before.

Reports and adoptions of a process come in order, on one stream; what they say
is checked exactly, and ends the stream. A reply comes by another stream, maybe
before the report that covers it: it may be ahead of the reports by what can
have been done since, and is refused beyond that. Who lies alike in reports and
replies is not found out here. (arXiv 2604.21428, Sec. 3.2.)
"""

from ddiloco_jax.protocol import events, ledger, membership
from ddiloco_jax.protocol.events import ZERO, Counts
from ddiloco_jax.protocol.state import Learner, State
from ddiloco_jax.protocol.turn import Turn

# No process takes a step in less, and reports it.
MIN_STEP_S = 1e-4
# Steps that a report may skip at any speed: a clock may be read late.
SLACK_STEPS = 1000
# Average step times, and tokens of a step, differ by less in one process.
FACTOR = 10


def check_report(state: State, old: Learner, event: events.Reported) -> None:
  """Refuses a report that its process's earlier ones make impossible.

  Raises:
    ValueError: The value, the rule and the fix.
  """
  who = _who(event)
  since = event.step - old.step
  most = SLACK_STEPS + (state.now - old.joined_at) / MIN_STEP_S
  if old.heard and since > most:
    raise ValueError(
      f"{who}: step {event.step} after {old.step}, and at most {most:.0f} steps"
      " can have been taken in between; count the steps of this process"
    )
  rows = zip(event.counts, old.counts, old.adopted_at)
  for p, (counts, before, at) in enumerate(rows):
    _check_steps(who, p, counts.steps, event.step, at)
    if counts.steps == before.steps and counts.tokens > before.tokens:
      raise ValueError(
        f"{who}: {counts.tokens} tokens of fragment {p} after {before.tokens}, "
        f"both in {counts.steps} steps from one base: only a step adds tokens; "
        "count those of the steps since the adoption"
      )
  known, now = dict(old.positions), dict(event.positions)
  given_up = [x for x in event.returned if x[0] in known and x[0] not in now]
  told = event.positions if old.heard or not known else ()
  for shard, batch in (*told, *given_up):
    read = known.get(shard)
    least = 0 if read is None else read
    # One that is new to it was told to begin at the accepted position.
    most = event.step + state.accepted.get(shard, 0)
    if read is not None:
      most = read + since
    if not least <= batch <= most:
      raise ValueError(
        f"{who}: position {batch} of data shard {shard}, after {least} and "
        f"{max(since, 0)} more steps: it lies in {least}..{most}, for a step "
        "reads one batch at most; send the next batch of the shard"
      )


def check_applied(old: Learner, event: events.Applied) -> None:
  """Refuses an adoption that resets more than its process can have counted.

  Raises:
    ValueError: The value, the rule and the fix.
  """
  p = event.fragment
  _check_reset(_who(event), event, old.counts[p], old.adopted_at[p])


def check_adoptions(old: Learner, event: events.Joined, who: str) -> None:
  """As `check_applied`, of those that a Hello, `who`, is the first to name."""
  counts, steps = list(old.counts), list(old.adopted_at)
  named = {a.fragment for a in event.adoptions if membership.is_known(old, a)}
  for p in range(len(counts)):
    if p not in named:  # One before them may be lost, and what it reset.
      counts[p] = ZERO
  for applied in membership.unknown_adoptions(old, event.adoptions):
    p = applied.fragment
    _check_reset(who, applied, counts[p], steps[p])
    counts[p], steps[p] = ZERO, applied.step


def _check_reset(
  who: str,
  event: events.Applied | events.Adoption,
  before: Counts,
  at: int | None,
) -> None:
  p, counts = event.fragment, event.counts
  _check_steps(who, p, counts.steps, event.step, at)
  if counts.steps <= before.steps and counts.tokens > before.tokens:
    raise ValueError(
      f"{who}, fragment {p}: {counts.tokens} tokens in {counts.steps} steps after "
      f"{before.tokens} in {before.steps}: only a step adds tokens; send the "
      "counts that the adoption reset"
    )


def _who(event: events.Reported | events.Applied) -> str:
  is_report = isinstance(event, events.Reported)
  return f"{'report of' if is_report else 'adoption by'} {event.learner!r}"


def _check_steps(
  who: str, p: int, num_steps: int, step: int, at: int | None
) -> None:
  most = max(0, step - (at or 0))
  if num_steps > most:
    raise ValueError(
      f"{who}, fragment {p}: {num_steps} steps since the adoption, which was at step "
      f"{at or 0}, and this is step {step}: at most {most} can be; count from "
      "the last adoption"
    )


def fault_of_reply(turn: Turn, event: events.Replied) -> str | None:
  """Why the counts or positions of a reply cannot be; None if they can."""
  learner = turn.learners[event.learner]
  (steps, tokens), (_, known_tokens) = event.counts, known(turn, event)
  ahead, may = _ahead(learner, event), _may_be_ahead(turn, learner)
  if ahead > may:
    return (
      f"{steps} steps since base {event.base.n} are {ahead} more than its "
      f"reports, which came to step {learner.step}, and at most {may} can have "
      "been taken since; send the counts of the copy"
    )
  new_steps = max(0, steps - known(turn, event).steps)
  rate = learner.peak_tokens or max(
    other.peak_tokens for other in turn.learners.values()
  )
  most = known_tokens + FACTOR * rate * new_steps
  if tokens > most and (rate or not new_steps):
    return (
      f"{tokens} tokens in {steps} steps since base {event.base.n}: it reported "
      f"{known_tokens} of them, and at most {rate:.4g} a step, so {most:.0f} is "
      "the bound; send the counts of the copy"
    )
  is_current = event.base == learner.bases[event.fragment]
  more = max(0, ahead) if is_current and learner.heard else may
  reported = dict(learner.positions)
  for shard, batch in event.positions:
    start = reported.get(shard)
    last = turn.accepted.get(shard, 0) + may if start is None else start + more
    if batch > last:
      return (
        f"position {batch} of data shard {shard} is beyond {last}, the last "
        "that its reported steps can have come to; send the positions of the "
        "copy"
      )
  return None


def known(turn: Turn, event: events.Replied) -> Counts:
  """The most that is known, without this reply, of the span that it covers."""
  account = turn.account(event.learner, event.fragment)
  span = ledger.find(account, event.incarnation, event.base)
  said = ZERO if span is None else span.said
  learner = turn.learners[event.learner]
  if event.base != learner.bases[event.fragment]:
    return said
  return ledger.larger(said, learner.counts[event.fragment])


def _ahead(learner: Learner, event: events.Replied) -> int:
  """Steps of the copy beyond the last reported one, as far as is known."""
  at = learner.adopted_at[event.fragment]
  if event.base == learner.bases[event.fragment] and at is not None:
    return at + event.counts.steps - learner.step
  return event.counts.steps - learner.step


def _may_be_ahead(turn: Turn, learner: Learner) -> int:
  """Steps that can have been taken since the last report."""
  since_s = turn.now - learner.stepped_at
  num = FACTOR * since_s / learner.step_s if learner.step_s else 0.0
  return turn.rules.cycle_steps + SLACK_STEPS // 10 + int(num)
