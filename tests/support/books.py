"""The laws of the books, held against a state and its tapes."""

import collections

from ddiloco_jax.protocol import events, ledger, tape
from ddiloco_jax.protocol.status import account_totals
from ddiloco_jax.report.ordeal import is_balanced


def check_nothing_lost(state):
  """What was not merged is what no reply could cover."""
  assert is_balanced(state)
  for name in state.learners:
    for p in range(state.rules.num_fragments):
      totals = account_totals(state, name, p)
      assert totals.merged.tokens > 0
      assert {book for book, _ in totals.discarded} <= {
        ledger.OVERWRITTEN,
        ledger.END,
      }


def check_merged(tapes, state):
  """Per (learner, fragment): merged tokens are those of included replies.

  Args:
    tapes: Of a run, oldest epoch first.
    state: The last one.
  """
  included = _included(tapes, state)
  assert is_balanced(state)
  for name in state.learners:
    for p in range(state.rules.num_fragments):
      mine = [x for x in included if (x.learner, x.fragment) == (name, p)]
      totals = account_totals(state, name, p)
      assert totals.merged.tokens == sum(x.counts.tokens for x in mine)
      assert totals.merged.tokens <= totals.reported.tokens
      # One base is merged from once, and one example read once.
      bases = [(x.incarnation, x.base) for x in mine]
      assert len(bases) == len(set(bases))
  read = collections.Counter(
    (x.fragment, shard, batch)
    for x in included
    for shard, end in x.positions
    for batch in range(end - x.counts.steps, end)
  )
  assert set(read.values()) == {1}


def _included(tapes, state):
  """The replies of every merge that no later epoch has rolled back."""
  merges, replies = [], {}
  for path in tapes:
    for line in tape.Reader(path).lines():
      assert not line.fault, line.fault
      if isinstance(line.event, events.Replied):
        replies.setdefault(_key(line.event), line.event)
      merges += [
        (line.state.epoch, effect)
        for effect in line.effects
        if isinstance(effect, events.Merge)
      ]
  kept = []
  for epoch, merge in merges:
    p, n = merge.fragment, merge.version.n
    bounds = [starts[p] for starts in state.starts[epoch:]]
    if n <= min((*bounds, state.fragments[p].version.n)):
      kept += [replies[item.key] for item in merge.inputs]
  keys = [_key(reply) for reply in kept]
  assert len(keys) == len(set(keys))
  return kept


def _key(event):
  return events.ReplyKey(
    event.learner, event.incarnation, event.fragment, event.round, event.attempt
  )
