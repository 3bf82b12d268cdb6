"""A syncer that dies and restores an older state, while its learners live on."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddiloco_jax.protocol import events, status
from ddiloco_jax.protocol.rules import Rules
from tests.protocol.driver import Learner, Run

RULES = Rules(
  num_fragments=3,
  cycle_steps=12,
  quorum=1,
  max_open_rounds=3,
  num_syncer_steps=90,
  max_learners=3,
  num_shards=3,
)


@settings(max_examples=60, deadline=None)
@given(
  saved_s=st.floats(3.0, 40.0),
  lost_s=st.floats(0.0, 30.0),
  downtime_s=st.floats(0.1, 30.0),
  slow_s=st.sampled_from([1.0, 1.3, 2.5]),
)
@example(saved_s=22.0, lost_s=8.0, downtime_s=3.0, slow_s=1.0)
def test_learners_outlive_any_rollback_and_the_books_hold(
  saved_s, lost_s, downtime_s, slow_s
):
  # The driver has every message checked as the service does.
  run = Run(
    RULES,
    [
      Learner("L0", down_s=0.3),
      Learner("L1", step_s=slow_s, up_s=0.4, down_s=0.9),
      Learner("L2", step_s=1.1, down_s=1.7),
    ],
  )
  run.run(until=saved_s)
  saved = run.state
  run.run(until=saved_s + lost_s)
  run.kill_syncer(saved, downtime_s)
  run.run(until=1000.0)

  assert run.finished is not None
  assert run.state.epoch == 2
  assert not run.finished.missing
  merged = [m for m in run.of(events.Merge) if m.version.epoch == 2]
  for p, fragment in enumerate(run.state.fragments):
    start = run.state.starts[-1][p]
    numbers = [m.version.n for m in merged if m.fragment == p]
    assert numbers == list(range(start + 1, fragment.version.n + 1))
    for learner in run.learners.values():
      assert learner.bases[p] == fragment.version
  for name in run.state.learners:
    for p in range(3):
      totals = status.account_totals(run.state, name, p)
      rest = [totals.merged, *(c for _, c in totals.discarded)]
      assert totals.pending == (0, 0)
      assert totals.reported.steps == sum(c.steps for c in rest)
