"""The laws of the books, held against a state and its tapes."""

from ddiloco_jax.protocol import ledger
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
