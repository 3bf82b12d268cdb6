"""Learners and syncers that restart in every phase: the books still balance.

The names in brackets are those of public fault reports: what users of such
systems ran into, as a kind.
"""

import signal
import threading

import pytest

from ddiloco_jax.protocol import tape
from ddiloco_jax.report import chronicle
from tests.support.books import check_merged
from tests.support.over_grpc import (
  Held,
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.processes import (
  SYNCER,
  address_of,
  ending,
  module,
  small_run,
)
from tests.support.served import wait_for

STEP_S = 0.03
# Between a pull and its push, within a push, between the push and the merge,
# between the publication and its adoption.
PHASES = ("pulled", "pushing", "pushed", "published")


class Halting:
  """A client that stops at a phase until it is let go on."""

  def __init__(self, client):
    self._client = client
    self._phase = ""
    self.reached = threading.Event()
    self.go_on = threading.Event()

  def __getattr__(self, name):
    return getattr(self._client, name)

  def stop_at(self, phase):
    self.reached.clear()
    self.go_on.clear()
    self._phase = phase

  def _pass(self, phase):
    if phase == self._phase:
      self._phase = ""
      self.reached.set()
      self.go_on.wait(60.0)

  def push(self, header, chunks):
    self._pass("pulled")
    result = self._client.push(header, self._in_parts(list(chunks)))
    self._pass("pushed")
    return result

  def _in_parts(self, chunks):
    for i, chunk in enumerate(chunks):
      if i == len(chunks) // 2:
        self._pass("pushing")
      yield chunk

  def fetch(self, session, fragment, n, exact):
    header, data = self._client.fetch(session, fragment, n, exact)
    if header.version.n:
      self._pass("published")
    return header, data


class Cast:
  """Ada, who is stopped, in as many lives as it takes; and bob beside her.

  A round needs both, so that it waits between ada's push and the merge while
  bob may not push.
  """

  def __init__(self, address):
    self.address = address
    self.gate = threading.Event()
    self.gate.set()
    self.ada: LoopLearner | None = None
    self.adas: list[LoopLearner] = []
    self.client: Halting | None = None
    self.bob = LoopLearner(
      address, "bob", paced(STEP_S), wrap=lambda c: Held(c, self.gate)
    )

  def next_ada(self):
    def wrap(client):
      self.client = Halting(client)
      return self.client

    self.ada = LoopLearner(
      self.address, "ada", paced(STEP_S), wrap=wrap, takeover=True
    )
    self.adas.append(self.ada)
    self.ada.start()

  def halt(self, phase):
    """Once it returns, ada is in this phase."""
    if phase == "pushed":
      self.gate.clear()
    self.client.stop_at(phase)
    assert self.client.reached.wait(60.0), phase

  def release(self):
    self.client.go_on.set()
    self.gate.set()

  def wait_for_merges(self, num=3):
    """Until ada has adopted so much more, of the newest epoch."""

    def adopted():
      epoch = self.ada.link.welcome.epoch if self.ada.adopted else 0
      return sum(v.epoch == epoch and v.n > 0 for _, v, *_ in self.ada.adopted)

    start = adopted()
    wait_for(lambda: adopted() >= start + num, 60.0)


def test_a_learner_restarts_in_every_phase(tmp_path):
  # [N10]
  cfg = settings(quorum=2, wire__chunk_bytes=16)
  with served_run(cfg, tmp_path / "run") as run:
    cast = Cast(run.address)
    with learners(cast.bob):
      cast.next_ada()
      for phase in PHASES:
        cast.wait_for_merges()
        cast.halt(phase)
        cast.ada.kill()
        cast.release()
        cast.next_ada()
      cast.wait_for_merges()
      run.request_stop()
      assert run.wait(60.0).exit_code == 0
      for learner in (cast.bob, cast.ada):
        learner.end()
    state = run.syncer.state

  check_merged([tmp_path / "run" / "tape.jsonl"], state)
  assert state.learners["ada"].incarnation > len(PHASES)


@pytest.mark.parametrize(
  ("phases", "both"),
  [
    (("pushing",), False),
    pytest.param(PHASES, False, marks=pytest.mark.slow),
    pytest.param(PHASES, True, marks=pytest.mark.slow),
  ],
)
def test_a_syncer_is_killed_in_every_phase(tmp_path, phases, both):
  # [N10] Alone, and together with a learner.
  run_dir = tmp_path / "run"
  flags = small_run(
    tmp_path,
    sync__cycle_steps=4,
    wire__up_format="float32",
    wire__chunk_bytes=16,
  )
  with ending() as start:
    syncer = start(
      module(SYNCER, "--address=127.0.0.1:0", *flags), tmp_path / "0.log"
    )
    cast = Cast(address_of(run_dir, syncer))
    with learners(cast.bob):
      cast.next_ada()
      for life, phase in enumerate(phases, start=1):
        cast.wait_for_merges()
        cast.halt(phase)
        syncer.signal(signal.SIGKILL)
        syncer.wait()
        if both:
          cast.ada.kill()
        cast.release()
        syncer = start(
          module(SYNCER, f"--address={cast.address}", "--restore", *flags),
          tmp_path / f"{life}.log",
        )
        address_of(run_dir, syncer)
        if both:
          cast.next_ada()
        wait_for(lambda n=life: epoch(cast.ada) == epoch(cast.bob) == n + 1, 60)
      cast.wait_for_merges()
      syncer.signal(signal.SIGTERM)
      assert syncer.wait(60.0) == 0, syncer.said()
      for learner in (cast.bob, cast.ada):
        learner.end()

  tapes = chronicle.tapes_of(run_dir)
  assert len(tapes) == len(phases) + 1
  check_merged(tapes, tape.replay(tapes[-1]).state)


def epoch(learner):
  return learner.link.welcome.epoch if learner.adopted else 0
