"""A syncer whose merge holds its CPU: nobody is thrown out, nothing is lost.

The names in brackets are those of public fault reports: what users of such
systems ran into, as a kind.
"""

import contextlib
import time

import jax
import optax
import pytest

from ddiloco_jax.launch import serving, syncing
from ddiloco_jax.protocol import events, tape
from ddiloco_jax.syncer.server import Server
from tests.support.books import check_nothing_lost
from tests.support.over_grpc import (
  THETA,
  LoopLearner,
  ServedRun,
  learners,
  paced,
  settings,
)
from tests.support.served import wait_for


class Busy:
  """An outer optimizer that computes in Python, when it is told to.

  Attributes:
    busy_s: How long its next steps take; they hold the interpreter, which the
      threads of the service need as well.
    num_steps: That took so long.
  """

  def __init__(self):
    self.busy_s = 0.0
    self.num_steps = 0
    inner = optax.sgd(1.0)

    def update(updates, state, params=None):
      waited = jax.pure_callback(
        self._compute, jax.ShapeDtypeStruct((), "float32"), 0
      )
      return inner.update(
        jax.tree.map(lambda x: x + waited, updates), state, params
      )

    self.tx = optax.GradientTransformation(inner.init, update)

  def _compute(self, _):
    end = time.monotonic() + self.busy_s
    self.num_steps += self.busy_s > 0
    while time.monotonic() < end:
      pass
    return jax.numpy.float32(0.0)


@contextlib.contextmanager
def served_by(tx, cfg, run_dir):
  """As `over_grpc.served_run`, with an outer optimizer of the test's own."""
  run = syncing.SyncerRun(cfg, str(run_dir), theta=THETA, tx=tx)
  server = Server("127.0.0.1:0", cfg.wire)
  server.serve(run.syncer)
  served = ServedRun(serving.Served(run, server.address), run_dir)
  try:
    yield served
  finally:
    served.request_stop()
    served.wait(60.0)
    server.stop(1.0)
    run.close()


@pytest.mark.parametrize(
  ("busy_s", "lease_s"),
  [
    (4.0, 2.0),
    pytest.param(30.0, 5.0, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
  ],
)
def test_nobody_is_evicted_while_a_merge_holds_the_cpu(
  tmp_path, busy_s, lease_s
):
  # [T5]
  cfg = settings(quorum=2, lease_s=lease_s)
  busy = Busy()
  with served_by(busy.tx, cfg, tmp_path / "run") as run:
    pair = [
      LoopLearner(run.address, name, paced(0.1)) for name in ("ada", "bob")
    ]

    def versions():
      return [f.version.n for f in run.syncer.state.fragments]

    with learners(*pair):
      wait_for(lambda: min(versions()) >= 2)
      busy.busy_s = busy_s
      wait_for(lambda: busy.num_steps >= 2, 4 * busy_s)
      busy.busy_s = 0.0
      before = versions()
      wait_for(lambda: min(versions()) >= max(before) + 2, 4 * busy_s + 20.0)
      run.request_stop()
      assert run.wait(60.0).exit_code == 0
      for learner in pair:
        learner.end()
    state = run.syncer.state

  lost = {"lease_expired", "push_broken", "late", "round_given_up"}
  assert not lost & {*state.counters}
  longest, silences = silences_in_merges(tmp_path / "run" / "tape.jsonl")
  assert longest >= busy_s
  assert max(silences) < lease_s
  check_nothing_lost(state)


def silences_in_merges(path):
  """(the longest merge, how long a learner was not heard within merges)."""
  begun, lasted, heard, silences = {}, [], {}, []
  for line in tape.Reader(path).lines():
    event = line.event
    if isinstance(event, events.LearnerEvent) and event.learner:
      since = heard.get(event.learner)
      if begun and since is not None:
        silences.append(event.time - max(since, min(begun.values())))
      heard[event.learner] = event.time
    if isinstance(event, events.Merged):
      lasted.append(event.time - begun.pop(event.fragment))
    for effect in line.effects:
      if isinstance(effect, events.Merge):
        begun[effect.fragment] = event.time
  return max(lasted), silences
