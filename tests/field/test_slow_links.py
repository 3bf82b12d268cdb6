"""Links that forget, and links that are slow: nothing is lost on either.

The names in brackets are those of public fault reports: what users of such
systems ran into, as a kind.
"""

import contextlib
import dataclasses

import numpy as np
import pytest

from ddiloco_jax.launch.relay import Relay
from ddiloco_jax.protocol import events, tape
from tests.support.books import check_nothing_lost
from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.served import wait_for

NOISE_S = 5.0  # What a busy machine may add to a wait.


@dataclasses.dataclass(frozen=True)
class Idle:
  """A link that forgets a connection on which nothing moved.

  Attributes:
    forget_s: For so long.
    keepalive_s: When a silent connection is probed.
    step_s: Eight steps lie between two pushes.
  """

  forget_s: float
  keepalive_s: float
  keepalive_timeout_s: float
  step_s: float

  @property
  def retry_s(self) -> float:
    """From a push into a forgotten connection to the next attempt."""
    return self.keepalive_s + self.keepalive_timeout_s + 1.0


@pytest.mark.parametrize(
  "idle",
  [
    pytest.param(Idle(1.0, 0.3, 0.5, 0.3), id="probed"),
    pytest.param(Idle(1.0, 3.0, 0.5, 0.3), id="forgotten"),
    pytest.param(
      Idle(20.0, 10.0, 10.0, 5.0),
      id="probed-20s",
      marks=[pytest.mark.slow, pytest.mark.timeout(600)],
    ),
    pytest.param(
      Idle(20.0, 60.0, 10.0, 5.0),
      id="forgotten-20s",
      marks=[pytest.mark.slow, pytest.mark.timeout(900)],
    ),
  ],
)
def test_a_push_over_a_connection_that_was_forgotten_arrives(tmp_path, idle):
  # [T4] Between two pushes nothing moves on the bulk connection, unless it is
  # probed; the control stream is never silent.
  cfg = settings(
    quorum=2,
    num_fragments=1,
    fragments__num_fragments=1,
    cycle_steps=8,
    lease_s=4.0,
    min_deadline_s=idle.retry_s + 2 * NOISE_S,
    wire__keepalive_s=idle.keepalive_s,
    wire__keepalive_timeout_s=idle.keepalive_timeout_s,
  )
  forgotten = idle.keepalive_s > idle.forget_s
  with (
    served_run(cfg, tmp_path / "run") as run,
    contextlib.closing(Relay(run.address, idle.forget_s)) as relay,
  ):
    ada = LoopLearner(relay.address, "ada", paced(idle.step_s), wire=cfg.wire)
    bob = LoopLearner(run.address, "bob", paced(idle.step_s), wire=cfg.wire)
    with learners(ada, bob):
      wait_for(lambda: merges_of(run, "ada") >= 2, 600.0)
      run.request_stop()
      finished = run.wait(idle.retry_s + 60.0)
      for learner in (ada, bob):
        learner.end()
    state = run.syncer.snapshot()[1]

  assert finished.exit_code == 0
  assert (relay.num_forgotten > 0) == forgotten
  waits = answers_after(tmp_path / "run" / "tape.jsonl", "ada")
  assert len(waits) >= 3
  assert max(waits) <= idle.retry_s + NOISE_S
  assert not {"lease_expired", "late", "round_given_up"} & {*state.counters}
  check_nothing_lost(state)


@dataclasses.dataclass(frozen=True)
class Narrow:
  """A link over which a fragment takes several leases each way.

  Attributes:
    num_params: Of the one fragment, in bfloat16 on the way.
    bytes_per_s: Each way.
    chunk_bytes: Some moments long.
  """

  num_params: int
  bytes_per_s: int
  chunk_bytes: int
  step_s: float
  cycle_steps: int
  lease_s: float


@pytest.mark.parametrize(
  "narrow",
  [
    Narrow(600_000, 400_000, 1 << 13, 0.5, 4, 1.2),
    pytest.param(
      Narrow(30 << 20, 1 << 20, 1 << 20, 1.0, 24, 5.0),  # 120 MB in float32.
      marks=[pytest.mark.slow, pytest.mark.timeout(1800)],
    ),
  ],
)
def test_a_learner_on_a_narrow_link_is_carried_into_later_rounds(
  tmp_path, narrow
):
  # [T11] K = 1, and two learners whose link is fast.
  theta = {"a": np.zeros(narrow.num_params, np.float32)}
  shapes = {"a": theta["a"].shape}
  cfg = settings(
    num_fragments=1,
    fragments__num_fragments=1,
    cycle_steps=narrow.cycle_steps,
    lease_s=narrow.lease_s,
    min_deadline_s=narrow.lease_s,
    wire__up_format="bfloat16",
    wire__down_format="bfloat16",
    wire__chunk_bytes=narrow.chunk_bytes,
  )
  path = tmp_path / "run" / "tape.jsonl"
  with (
    served_run(cfg, tmp_path / "run", theta=theta) as run,
    contextlib.closing(Relay(run.address)) as relay,
  ):
    relay.shape(bytes_per_s=narrow.bytes_per_s)
    slow = LoopLearner(
      relay.address,
      "slow",
      paced(narrow.step_s, shapes=shapes),
      connect_timeout_s=300.0,
    )
    fast = [
      LoopLearner(run.address, name, paced(narrow.step_s, shapes=shapes))
      for name in ("ada", "bob")
    ]
    with learners(slow, *fast):
      wait_for(lambda: merges_of(run, "slow") >= 2, 200 * narrow.lease_s)
      state = run.syncer.state
      relay.shape()
      run.request_stop()
      run.wait(60.0)
      for learner in (slow, *fast):
        learner.end()

  assert relay.num_connections == 2  # Neither was aborted.
  assert not {"lease_expired", "push_broken", "carry_expired"} & {
    *state.counters
  }
  assert not any(name.startswith("refused") for name in state.counters)
  waits, outcomes = fates(path, "slow")
  assert sorted(waits)[len(waits) // 2] > 2 * narrow.lease_s
  assert outcomes.count(events.Outcome.CARRIED) >= 2


def merges_of(run, name):
  """Versions that a learner was merged into, over all fragments."""
  return sum(
    account.h_replies for account in run.syncer.state.accounts.get(name, ())
  )


def answers_after(path, name):
  """Seconds from each pull of a learner to its reply."""
  asked, waits = {}, []
  for line in tape.Reader(path).lines():
    event = line.event
    for effect in line.effects:
      if isinstance(effect, events.Pull) and effect.learner == name:
        key = effect.fragment, effect.round, effect.attempt
        asked.setdefault(key, event.time)
    if isinstance(event, events.Replied) and event.learner == name:
      key = event.fragment, event.round, event.attempt
      if key in asked:
        waits.append(event.time - asked.pop(key))
  assert not asked, f"{name} has not answered {asked}"
  return waits


def fates(path, name):
  """(seconds from pull to reply, what became of each) before the end."""
  asked, waits, outcomes = {}, [], []
  for line in tape.Reader(path).lines():
    if line.state.end is not None:
      break
    for effect in line.effects:
      if isinstance(effect, events.Pull) and effect.learner == name:
        asked[effect.round, effect.attempt] = line.event.time
      if isinstance(effect, events.Resolved) and effect.key.learner == name:
        key = effect.key.round, effect.key.attempt
        waits.append(line.event.time - asked[key])
        outcomes.append(effect.outcome)
  return waits, outcomes
