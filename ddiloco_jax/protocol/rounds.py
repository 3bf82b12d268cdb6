"""A round: frozen members are pulled, K replies close it after the grace.

Every reply is resolved exactly once; a round ends in a merge or is given up
at its deadline. (arXiv 2604.21428, Sec. 3.1, Eq. 3, Alg. 1.)
"""

from ddiloco_jax.protocol import events, ledger, membership, replies
from ddiloco_jax.protocol.events import Outcome, Receiver
from ddiloco_jax.protocol.state import (
  Asked,
  Due,
  Learner,
  Member,
  Round,
  State,
  Sync,
)
from ddiloco_jax.protocol.turn import Turn


def open_due(turn: Turn) -> None:
  """Opens a round for every due fragment that may have one now."""
  if not turn.queue:
    return
  for due in turn.queue:
    if len(turn.rounds) >= turn.rules.max_open_rounds:
      return
    if turn.now < due.not_before or turn.round_of(due.fragment) is not None:
      continue
    if turn.num_live + len(turn.carried) < turn.rules.quorum:
      return
    members = [
      learner
      for learner in turn.learners.values()
      if is_member(turn, learner, due.fragment)
    ]
    needed = quorum_of(turn, due, members)
    if needed is not None:
      turn.queue = tuple(d for d in turn.queue if d is not due)
      open_round(turn, due, members, needed)


def find_round(state: State | Turn, fragment: int) -> Round | None:
  """The open round of a fragment, if there is one."""
  return next((r for r in state.rounds if r.fragment == fragment), None)


def is_member(turn: Turn, learner: Learner, p: int) -> bool:
  """Whether a learner is eligible for the next round of fragment p."""
  rules = turn.rules
  if not (learner.live and learner.training and learner.connected):
    return False
  if rules.wait_for_publication:
    if not any(boundary[0] == p for boundary in learner.boundaries):
      return False
  elif rules.members == "reported" and learner.reported_t < turn.t - 1:
    return False
  return has_progress(turn, learner, p) and is_free(turn, learner, p)


def has_progress(turn: Turn, learner: Learner, p: int) -> bool:
  """Whether it made a step from a base that no merge has used already."""
  base = learner.bases[p]
  if base is None or learner.counts[p].steps < 1:
    return False
  return base.n >= turn.account(learner.learner, p).merged_n


def is_free(turn: Turn, learner: Learner, p: int) -> bool:
  """Whether it may answer a pull of fragment p now."""
  if len(learner.asked) >= learner.max_replies:
    return False
  if turn.is_asked(learner, p) is not None:
    return False
  return not any(
    reply.key.fragment == p and reply.key.learner == learner.learner
    for reply in turn.carried
  )


def quorum_of(turn: Turn, due: Due, members: list[Learner]) -> int | None:
  """The replies that a round of these members needs; None: not to be opened."""
  k = turn.rules.quorum
  num = len(members) + sum(r.key.fragment == due.fragment for r in turn.carried)
  if not turn.rules.wait_for_publication:
    return k if num >= k else None
  # K learners have come to the boundary; one that joined behind it has no
  # copy, and must not hold up those that wait there.
  reached = sum(
    learner.live and learner.step >= due.slot
    for learner in turn.learners.values()
  )
  return min(k, num) if num and reached >= k else None


def open_round(
  turn: Turn,
  due: Due,
  learners: list[Learner],
  needed: int,
  *,
  flush: bool = False,
) -> None:
  """Freezes the members and pulls from each."""
  p, number, attempt = due.fragment, due.round, due.attempt
  if number < 0:
    number, attempt = turn.next_round, 0
    turn.next_round += 1
  members = tuple(Member(m.learner, m.incarnation) for m in learners)
  r = Round(
    fragment=p,
    round=number,
    attempt=attempt,
    slot=due.slot,
    opened_at=turn.now,
    deadline=turn.now + turn.deadline_s(),
    quorum=needed,
    members=members,
    waiting=members,
    flush=flush,
  )
  turn.rounds = (*turn.rounds, r)
  reason = (
    f"t={turn.t}: fragment {p} is due; round {number} attempt {attempt} asks "
    f"{len(members)} members, quorum {needed}"
  )
  for learner in learners:
    _pull(turn, learner, r, reason)
  replies.take_carried(turn, p)


def _pull(turn: Turn, learner: Learner, r: Round, reason: str) -> None:
  asked = Asked(r.fragment, r.round, r.attempt)
  turn.put(learner._replace(asked=(*learner.asked, asked)))
  account = turn.account(learner.learner, r.fragment)
  key = (learner.incarnation, r.round, r.attempt)
  turn.put_account(
    learner.learner,
    r.fragment,
    account._replace(asked=(*account.asked[-2:], key)),
  )
  turn.emit(
    events.Pull(
      learner=learner.learner,
      incarnation=learner.incarnation,
      fragment=r.fragment,
      round=r.round,
      attempt=r.attempt,
      reason=reason,
    )
  )


def progress(turn: Turn) -> None:
  """Closes, or gives up, every open round whose time has come."""
  for r in turn.rounds:
    if r.merging:
      continue
    if r.quorum_at is not None:
      assert r.grace_end is not None
      if not r.waiting or turn.now >= r.grace_end:
        _close(turn, r)
    elif turn.now >= r.deadline:
      give_up(turn, r, "its deadline has passed")
    elif _is_hopeless(turn, r):
      give_up(turn, r, "no member is left that could reply")


def _is_hopeless(turn: Turn, r: Round) -> bool:
  if r.waiting or len(r.replies) >= r.quorum:
    return False
  return not is_carried_under_way(turn, r.fragment)


def is_carried_under_way(turn: Turn, p: int) -> bool:
  return any(
    asked.carried and asked.fragment == p
    for learner in turn.learners.values()
    for asked in learner.asked
  )


def _close(turn: Turn, r: Round) -> None:
  """Judges the replies against each other, and merges what is left."""
  kept = replies.judge_together(turn, r)
  if len(kept) < len(r.replies):
    fresh = (turn.round_of(r.fragment) or r)._replace(replies=kept)
    if len(kept) < r.quorum or not any(reply.weight > 0 for reply in kept):
      fresh = fresh._replace(quorum_at=None, grace_end=None)
    turn.put_round(turn.round_of(r.fragment) or r, fresh)
    if fresh.quorum_at is None:
      return
    r = fresh
  _dismiss(turn, r)
  version = events.Version(turn.epoch, turn.fragments[r.fragment].version.n + 1)
  turn.put_round(r, r._replace(waiting=(), merging=True))
  assert r.quorum_at is not None
  turn.emit(
    events.Merge(
      fragment=r.fragment,
      round=r.round,
      attempt=r.attempt,
      version=version,
      inputs=tuple(
        events.MergeInput(reply.key, reply.weight) for reply in r.replies
      ),
      reason=(
        f"round {r.round} of fragment {r.fragment}: {len(r.replies)} replies, "
        f"quorum {r.quorum} after {r.quorum_at - r.opened_at:.3f} s, waited "
        f"{turn.now - r.quorum_at:.3f} s more for {len(r.members)} members"
      ),
    )
  )


def _dismiss(turn: Turn, r: Round) -> None:
  """Carries the replies whose bytes still move; the others will be late."""
  for name, _ in r.waiting:
    learner = turn.learners[name]
    asked = turn.is_asked(learner, r.fragment)
    if asked is None or asked.round != r.round:
      continue
    others = tuple(a for a in learner.asked if a is not asked)
    moves = asked.moved_at is not None and (
      turn.now - asked.moved_at < turn.deadline_s()
    )
    if moves:
      others = (*others, asked._replace(carried=True))
      replies.watch_carried(turn, asked)
    turn.put(learner._replace(asked=others))
    turn.settle(name, r.fragment)


def give_up(turn: Turn, r: Round, why: str) -> None:
  """Ends a round without a merge; its fragment is due again after a step."""
  p = r.fragment
  _dismiss(turn, r)
  turn.put_round(r, None)
  book = ledger.GIVEN_UP if turn.end is None else ledger.END
  for reply in r.replies:
    replies.drop(turn, reply, book, f"round {r.round}: {why}")
  reason = (
    f"round {r.round} attempt {r.attempt} of fragment {p} is given up after "
    f"{turn.now - r.opened_at:.3f} s: {why}; {len(r.replies)} of "
    f"{len(r.members)} members replied, quorum {r.quorum}"
  )
  turn.count("round_given_up")
  turn.emit(
    events.GiveUp(
      fragment=p,
      round=r.round,
      attempt=r.attempt,
      receivers=tuple(
        Receiver(m.learner, m.incarnation, Outcome.REFUSED, why)
        for m in r.members
      ),
      reason=reason,
    )
  )
  if r.refused and not r.replies:
    replies.all_refused(turn, r)
  if turn.end is None:
    _requeue(turn, r)


def due_again(r: Round, not_before: float = 0.0) -> Due:
  """The next attempt of a round."""
  return Due(r.fragment, r.slot, r.round, r.attempt + 1, not_before)


def _requeue(turn: Turn, r: Round) -> None:
  wait_s = turn.step_s or turn.rules.min_deadline_s
  due = due_again(r, turn.now + wait_s)
  others = tuple(d for d in turn.queue if d.fragment != r.fragment)
  if len(others) < len(turn.queue):
    turn.count("slot_missed")
  turn.queue = (*others, due)


def merged(turn: Turn, event: events.Merged) -> None:
  """A new version is ready: its replies are booked, and all are told."""
  r = turn.round_of(event.fragment)
  if r is None or not r.merging or r.round != event.round:
    turn.count("merged_unknown")
    return
  p, fragment = r.fragment, turn.fragments[r.fragment]
  if event.version != (turn.epoch, fragment.version.n + 1):
    turn.count("merged_unknown")
    return
  turn.put_round(r, None)
  tokens = fragment.merged
  for reply in r.replies:
    account = turn.account(reply.key.learner, p)
    account = ledger.merge(account, reply.key, event.version.n)
    if fragment.num_merges and not r.flush:
      account = account._replace(
        h_steps=account.h_steps + reply.counts.steps,
        h_replies=account.h_replies + 1,
      )
    turn.put_account(reply.key.learner, p, account)
    turn.settle(reply.key.learner, p)
    tokens = ledger.plus(tokens, reply.counts)
  contributors = tuple(
    Member(reply.key.learner, reply.key.incarnation) for reply in r.replies
  )
  fragment = fragment._replace(
    version=event.version,
    num_merges=fragment.num_merges + 1,
    contributors=contributors,
    merged=tokens,
  )
  turn.newest_merge = p
  turn.put_fragment(p, replies.remember_scales(fragment, r.replies))
  if not r.flush:
    _track_sync(turn, r, event.version)
  if turn.end is None or not r.flush:
    publish(turn, r, event.version)


def _track_sync(turn: Turn, r: Round, version: events.Version) -> None:
  if turn.num_training:
    last = max(reply.at for reply in r.replies)
    need = (turn.num_training + 1) // 2
    turn.own("syncs")[r.fragment] = Sync(version, last, need)


def publish(turn: Turn, r: Round, version: events.Version) -> None:
  """Tells every live learner of a version, and what became of its reply."""
  included = {reply.key.learner: reply.key for reply in r.replies}
  refused = {refusal.key.learner: refusal for refusal in r.refused}
  asked = {member.learner for member in r.members}
  receivers = tuple(
    _receiver(learner, r, included, refused, asked)
    for learner in turn.learners.values()
    if learner.live and learner.connected
  )
  turn.emit(
    events.Publish(
      fragment=r.fragment,
      version=version,
      receivers=receivers,
      reason=(
        f"version {version.n} of fragment {r.fragment} merges "
        f"{len(r.replies)} of {len(r.members)} members of round {r.round}: "
        f"{', '.join(sorted(included))}"
      ),
    )
  )


def _receiver(learner: Learner, r: Round, included, refused, asked) -> Receiver:
  name, incarnation = learner.learner, learner.incarnation
  key = included.get(name)
  if key is not None and key.incarnation == incarnation:
    return Receiver(
      name, incarnation, Outcome.INCLUDED, "", key.round, key.attempt
    )
  refusal = refused.get(name)
  if refusal is not None and refusal.key.incarnation == incarnation:
    key = refusal.key
    return Receiver(
      name,
      incarnation,
      Outcome.REFUSED,
      refusal.reason,
      key.round,
      key.attempt,
    )
  if name not in asked:
    return Receiver(name, incarnation, Outcome.NOT_ASKED)
  outcome = Outcome.LATE
  for a in learner.asked:
    if a.fragment == r.fragment and a.carried:
      outcome = Outcome.CARRIED
  return Receiver(
    name,
    incarnation,
    outcome,
    f"round {r.round} closed before the reply was whole",
    r.round,
    r.attempt,
  )


def applied(turn: Turn, event: events.Applied) -> None:
  """A process adopted a published version at a step boundary."""
  learner = turn.speaker(event)
  p = event.fragment
  if learner is None or not 0 <= p < turn.rules.num_fragments:
    turn.count("fenced")
    return
  learner = membership.hear(turn, learner)
  base = learner.bases[p]
  if not membership.is_valid_base(turn, p, event.version):
    turn.count("applied_unknown")
    return
  if (
    base is not None
    and membership.is_valid_base(turn, p, base)
    and event.version.n < base.n
  ):
    turn.count("applied_stale")
    return
  membership.adopt(turn, learner, p, event.version, event.counts)
  sync = turn.syncs.get(p)
  if sync is None or event.version.n < sync.version.n or not learner.training:
    return
  sync = sync._replace(seen=sync.seen + 1)
  syncs = turn.own("syncs")
  syncs[p] = sync
  if sync.seen >= sync.need:
    del syncs[p]
    # Half a step of it is the wait for a boundary, not the network's.
    waited_s = turn.now - sync.replied_at - (turn.step_s or 0.0) / 2
    turn.sample("sync_s", max(0.0, waited_s))
