"""A merged version: booked, published to everybody, adopted by each in time.

(arXiv 2604.21428, Sec. 3.1.)
"""

from ddiloco_jax.protocol import events, guards, ledger, membership
from ddiloco_jax.protocol.events import Outcome, Receiver
from ddiloco_jax.protocol.state import Learner, Member, Round, Sync
from ddiloco_jax.protocol.turn import Turn


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
  turn.put_fragment(p, guards.remember_scales(fragment, r.replies))
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
  """Tells everybody on a stream of a version, and what became of its reply.

  Also who is not live: it may have been silent for a while only, and could not
  be asked again before it knows of the version that it was merged into.
  """
  included = {reply.key.learner: reply.key for reply in r.replies}
  refused = {refusal.key.learner: refusal for refusal in r.refused}
  asked = {member.learner for member in r.members}
  receivers = tuple(
    _receiver(learner, r, included, refused, asked)
    for learner in turn.learners.values()
    if learner.connected
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
    # Fetched before a restart that rolled it back, and adopted after it.
    turn.count("applied_rolled_back")
    membership.adopt(turn, learner, p, event.version, event.step, event.counts)
    membership.replace_rolled_back(turn, learner, p, event.version)
    return
  if (
    base is not None
    and membership.is_valid_base(turn, p, base)
    and event.version.n < base.n
  ):
    turn.count("applied_stale")
    return
  learner = membership.adopt(
    turn, learner, p, event.version, event.step, event.counts
  )
  _excuse(turn, learner, p)
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


def _excuse(turn: Turn, learner: Learner, p: int) -> None:
  """Nobody waits for a process that adopted before it began to answer.

  After its round has closed, its answer would hold the first steps since the
  adoption only, and keep it from being asked for more. In the end of a run it
  takes no more steps, and will never have an answer.
  """
  r, asked = turn.round_of(p), turn.is_asked(learner, p)
  if asked is None or asked.moved_at is not None:
    return
  if not asked.carried and turn.end is None:
    return
  others = tuple(a for a in learner.asked if a is not asked)
  turn.put(learner._replace(asked=others))
  turn.settle(learner.learner, p)
  member = Member(learner.learner, learner.incarnation)
  if r is None or member not in r.waiting:
    return
  waiting = tuple(w for w in r.waiting if w != member)
  fresh = r._replace(waiting=waiting)
  if r.flush and (num := len(waiting) + len(r.replies)):
    fresh = fresh._replace(quorum=min(r.quorum, num))
  if (
    fresh.quorum_at is None
    and len(fresh.replies) >= fresh.quorum
    and any(reply.weight > 0 for reply in fresh.replies)
  ):
    fresh = fresh._replace(quorum_at=turn.now, grace_end=turn.now)
  turn.put_round(r, fresh)
