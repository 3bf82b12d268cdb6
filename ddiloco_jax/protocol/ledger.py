"""The books: what became of every step and token, per (learner, fragment).

reported = merged + discarded + pending, exactly. Counts grow over a *span*,
from one adoption to the next; a span is booked when it is over and no reply
that could cover it is under way. (arXiv 2604.21428, Sec. 3.2.)
"""

from typing import NamedTuple

from ddiloco_jax.protocol.events import (
  ZERO,
  Counts,
  Outcome,
  ReplyKey,
  Version,
)

OVERWRITTEN = "overwritten_in_flight"
LATE = "late"
GIVEN_UP = "round_given_up"
LOST = "learner_lost"
END = "end_of_run"


def refused_book(kind: str) -> str:
  """The book of replies that were refused for one kind of reason."""
  return f"refused({kind})"


def plus(a: Counts, b: Counts) -> Counts:
  return Counts(a[0] + b[0], a[1] + b[1])


def minus(a: Counts, b: Counts) -> Counts:
  """a - b, not below zero."""
  return Counts(max(0, a[0] - b[0]), max(0, a[1] - b[1]))


def larger(a: Counts, b: Counts) -> Counts:
  return Counts(max(a[0], b[0]), max(a[1], b[1]))


def smaller(a: Counts, b: Counts) -> Counts:
  return Counts(min(a[0], b[0]), min(a[1], b[1]))


class Span(NamedTuple):
  """Steps between two adoptions of one fragment by one process.

  Attributes:
    said: The most that a reply or an adoption said of it; a report of a span
      that is not over is kept with the learner instead.
    rest: Where the part goes that no reply covers, once the span is over;
      "" while it is not.
    pending: The accepted reply that covers it and is not merged yet.
    covered: What that reply covers.
    merged: What a merged reply covers.
    lost: What a reply covers that was not taken.
    lost_book: Why.
  """

  incarnation: int
  base: Version
  said: Counts = ZERO
  rest: str = ""
  pending: ReplyKey | None = None
  covered: Counts = ZERO
  merged: Counts = ZERO
  lost: Counts = ZERO
  lost_book: str = ""


class Answer(NamedTuple):
  """What a reply was told; remembered so that it is told the same again."""

  incarnation: int
  round: int
  attempt: int
  outcome: Outcome
  reason: str


class Account(NamedTuple):
  """One (learner, fragment).

  Attributes:
    reported, merged, discarded: Of spans that are booked.
    spans: Those that are not, oldest base first.
    merged_n: Version that its newest merged reply went into; with its round
      and attempt.
    asked: (incarnation, round, attempt) of its last pulls.
    answers: What its last replies were told.
    h_steps, h_replies: c_steps summed over accepted replies (realised H).
  """

  reported: Counts = ZERO
  merged: Counts = ZERO
  discarded: tuple[tuple[str, Counts], ...] = ()
  spans: tuple[Span, ...] = ()
  merged_n: int = 0
  merged_round: int = -1
  merged_attempt: int = -1
  asked: tuple[tuple[int, int, int], ...] = ()
  answers: tuple[Answer, ...] = ()
  h_steps: int = 0
  h_replies: int = 0


class Totals(NamedTuple):
  reported: Counts
  merged: Counts
  discarded: tuple[tuple[str, Counts], ...]
  pending: Counts


def begin(account: Account, incarnation: int, base: Version) -> Account:
  """Opens the span of a base, unless a reply that came first opened it."""
  for span in account.spans:
    if (span.incarnation, span.base, span.rest) == (incarnation, base, ""):
      return account
  spans = (*account.spans, Span(incarnation, base))
  return account._replace(spans=spans)


def find(
  account: Account, incarnation: int, base: Version, c: Counts = ZERO
) -> Span | None:
  """The span of a base that a reply covers, unless it is booked.

  The newest; or, where the same base was adopted once more while the reply was
  under way, the one before, if it was long enough for what the reply covers.
  """
  spans = [s for s in account.spans if s[:2] == (incarnation, base)]
  for span in spans[:-1]:
    if c != ZERO and larger(span.said, c) == span.said and not span.pending:
      return span
  return spans[-1] if spans else None


def cover(account: Account, key: ReplyKey, base: Version, c: Counts) -> Account:
  """Takes an accepted reply in: its counts are pending until it is merged."""
  span = find(account, key.incarnation, base, c)
  assert span is not None, key
  assert span.pending is None, (key, span)
  return _swap(
    account,
    span,
    span._replace(pending=key, covered=c, said=larger(span.said, c)),
  )


def uncover(account: Account, key: ReplyKey, book: str) -> Account:
  """An accepted reply is not merged after all; a later one may cover more."""
  for span in account.spans:
    if span.pending == key:
      fresh = _with_lost(span, span.covered, book)
      return _swap(account, span, fresh._replace(pending=None))
  return account


def lose(
  account: Account, incarnation: int, base: Version, c: Counts, book: str
) -> Account:
  """A reply that was not taken covers part of a span, as far as it is said."""
  span = find(account, incarnation, base, c)
  if span is None:
    return account
  return _swap(account, span, _with_lost(span, c, book))


def merge(account: Account, key: ReplyKey, n: int) -> Account:
  """An accepted reply was merged into version n."""
  for span in account.spans:
    if span.pending == key:
      fresh = span._replace(
        pending=None, merged=larger(span.merged, span.covered)
      )
      account = _swap(account, span, fresh)
  return account._replace(
    merged_n=n,
    merged_round=key.round,
    merged_attempt=key.attempt,
  )


def close(
  account: Account,
  incarnation: int,
  current: Version | None,
  counts: Counts,
  before: Version | None,
  rest: str,
) -> Account:
  """Ends the spans of a process that an adoption, or its end, resets.

  Args:
    account: Of one (learner, fragment).
    incarnation: Of the process.
    current: The base that `counts` belong to.
    counts: Its newest report.
    before: Ends only the spans of older bases; None ends all.
    rest: The book for what no reply covers.
  """
  spans = []
  for span in account.spans:
    if span.incarnation == incarnation and not span.rest:
      if span.base == current:
        span = span._replace(said=larger(span.said, counts))
      if before is None or span.base.n < before.n or span.base == current:
        span = span._replace(rest=rest)
    if spans and _is_alike(spans[-1], span):  # One base, adopted repeatedly.
      span = span._replace(said=plus(spans.pop().said, span.said))
    spans.append(span)
  return account._replace(spans=tuple(spans))


def _is_alike(a: Span, b: Span) -> bool:
  """Whether two spans are over, and nothing but what was said is known."""
  bare = Span(b.incarnation, b.base, rest=b.rest)
  return bool(b.rest) and a._replace(said=ZERO) == b._replace(said=ZERO) == bare


def say(
  account: Account, incarnation: int, current: Version | None, counts: Counts
) -> Account:
  """Keeps the newest report of a span with the span itself."""
  for span in account.spans:
    if (span.incarnation, span.base, span.rest) == (incarnation, current, ""):
      fresh = span._replace(said=larger(span.said, counts))
      return _swap(account, span, fresh)
  return account


def settle(account: Account) -> Account:
  """Books every span that is over and that no pending reply covers."""
  if not any(span.rest and span.pending is None for span in account.spans):
    return account
  reported, merged = account.reported, account.merged
  books = dict(account.discarded)
  kept = []
  for span in account.spans:
    if not span.rest or span.pending is not None:
      kept.append(span)
      continue
    done = smaller(span.merged, span.said)
    lost = minus(smaller(span.lost, span.said), done)
    rest = minus(minus(span.said, done), lost)
    reported, merged = plus(reported, span.said), plus(merged, done)
    for book, part in ((span.lost_book, lost), (span.rest, rest)):
      if part != (0, 0):
        books[book] = plus(books.get(book, ZERO), part)
  return account._replace(
    reported=reported,
    merged=merged,
    discarded=tuple(books.items()),
    spans=tuple(kept),
  )


def totals(
  account: Account, incarnation: int, current: Version | None, counts: Counts
) -> Totals:
  """The books of an account at this moment.

  Args:
    account: Of one (learner, fragment).
    incarnation: Of the learner's newest process.
    current: Its base of this fragment.
    counts: Its newest report since that base.
  """
  reported, merged = account.reported, account.merged
  pending = ZERO
  for span in account.spans:
    said = span.said
    if (
      not span.rest and span.incarnation == incarnation and span.base == current
    ):
      said = larger(said, counts)
    done = smaller(span.merged, said)
    reported, merged = plus(reported, said), plus(merged, done)
    pending = plus(pending, minus(said, done))
  return Totals(reported, merged, account.discarded, pending)


def told(account: Account, answer: Answer) -> Account:
  """Remembers what a reply was told: the last two rounds and a carried one."""
  answers = (*account.answers[-3:], answer)
  return account._replace(answers=answers)


def _with_lost(span: Span, c: Counts, book: str) -> Span:
  if c <= span.lost:
    return span
  return span._replace(lost=larger(span.lost, c), lost_book=book)


def _swap(account: Account, old: Span, new: Span) -> Account:
  spans = tuple(new if span is old else span for span in account.spans)
  return account._replace(spans=spans)
