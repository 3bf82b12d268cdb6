"""Which learner gives its state to one that joins: pure, and the same always."""

import pytest

from ddiloco_jax.protocol import check, events, machine, recovery
from ddiloco_jax.protocol.events import Counts, Version
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.protocol.state import FragmentState, Learner

RULES = Rules(num_fragments=2, cycle_steps=4, num_shards=8, max_learners=8)


def learner(name, **fields):
  known = {
    "nonce": name,
    "incarnation": 1,
    "shards": (0,),
    "reads": (0,),
    "joined_at": 0.0,
    "heard_at": 0.0,
    "step": 5,
    "counts": (Counts(), Counts()),
    "bases": (Version(1, 3), Version(1, 2)),
    "training": True,
    "num_steps": 5,
    "state_address": f"{name}:1",
  }
  return Learner(learner=name, **{**known, **fields})


def state_of(*learners, merged=True):
  versions = ((1, 3), (1, 2)) if merged else ((1, 0), (1, 0))
  fragments = tuple(FragmentState(Version(*v)) for v in versions)
  return machine.initial(RULES)._replace(
    fragments=fragments, learners={m.learner: m for m in learners}
  )


@pytest.mark.parametrize(
  "unfit",
  [
    {"live": False},
    {"training": False},
    {"connected": False},
    {"state_address": ""},
    {"bases": (None, Version(1, 2))},
  ],
)
def test_only_a_healthy_learner_that_serves_is_a_donor(unfit):
  assert recovery.donor_for(state_of(learner("a", **unfit)), "x") is None


def test_nobody_is_its_own_donor():
  assert recovery.donor_for(state_of(learner("a")), "a") is None


def test_a_run_without_a_merge_has_no_donor():
  assert recovery.donor_for(state_of(learner("a"), merged=False), "x") is None


def test_who_has_applied_all_comes_before_who_has_more_steps():
  behind = learner("b", bases=(Version(1, 2), Version(1, 2)), num_steps=900)
  state = state_of(learner("a"), behind, learner("c", num_steps=4))

  assert recovery.donor_for(state, "x") == events.Donor("a", "a:1")
  assert recovery.donor_for(state, "x", "b") == events.Donor("b", "b:1")
  assert recovery.donor_for(state, "x", "b", ["b"]) == events.Donor("a", "a:1")
  assert recovery.donor_for(state, "x", but_not=["a", "b", "c"]) is None


def test_a_new_process_is_told_a_donor_and_a_reconnect_is_not():
  state = state_of(learner("a"))
  joined = events.Joined(time=1.0, learner="x", nonce="n", state_address="x:1")

  state, first = machine.step(state, joined)
  state, second = machine.step(state, joined)

  welcomes = [e for e in (*first, *second) if isinstance(e, events.Welcome)]
  assert [w.donor for w in welcomes] == [events.Donor("a", "a:1"), None]
  assert state.learners["x"].state_address == "x:1"


def test_where_a_process_has_its_state_from_is_counted_once():
  state = state_of(learner("a"))
  told = events.Recovered(
    time=1.0, learner="a", incarnation=1, source="peer", donor="b", reason="r"
  )

  for _ in range(2):
    state, _ = machine.step(state, told)

  assert state.counters["recovered_peer"] == 1
  assert state.learners["a"].recovered == "inner state from peer b: r"


def test_an_unknown_source_is_refused():
  state = state_of(learner("a"))
  told = events.Recovered(learner="a", incarnation=1, source="magic")

  with pytest.raises(ValueError, match="checkpoint"):
    check.check(state, told)
