"""What a learner starts from, and what becomes of a reply to an old version."""

import contextlib
import dataclasses
import queue
import threading
import time

import numpy as np
import pytest

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments
from ddiloco_jax.data import stream
from ddiloco_jax.launch import syncing, training
from ddiloco_jax.models import transformer
from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.events import Counts, Outcome, Version
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.training import mesh, trainer
from ddiloco_jax.wire import codec, port
from ddiloco_jax.wire.status import ServiceError
from tests.support import small
from tests.support.numpy_learner import NumpyLearner, Spoil
from tests.support.over_grpc import (
  LoopLearner,
  digest_of,
  learners,
  served_run,
)
from tests.support.served import Served, wait_for


class Watched(trainer.Trainer):
  """Keeps the parameters that its first step starts from; takes its time."""

  first: dict | None = None

  def step(self, batch, index):
    time.sleep(0.05)
    if self.first is None:
      self.first = flat(self.params)
    return super().step(batch, index)


def flat(params):
  return {k: np.array(x) for k, x in fragments.flatten(params).items()}


def test_learners_of_other_seeds_start_from_version_0_and_end_alike(tmp_path):
  # [N3, N13, N16] The project's own trainer; its rate rises 26-fold.
  editable = small.get_config()
  editable.sync.num_syncer_steps = 80
  editable.sync.quorum = 2
  cfg = config.freeze(editable)
  made = [
    Watched(
      transformer.make_model(cfg.model), cfg.train, mesh.make_mesh(cfg.mesh), s
    )
    for s in (11, 12)
  ]
  own = [digest_of(flat(each.params)) for each in made]
  make_batches = training.batches_of(cfg, cfg.sync.num_shards)
  for each in made:
    each.warm_up(make_batches(0)(0))

  with served_run(cfg, tmp_path / "run", theta=init(cfg)) as run:
    pair = [
      LoopLearner(run.address, f"l{m}", each, make_batches)
      for m, each in enumerate(made)
    ]
    with learners(*pair):
      finished = run.wait(90.0)
      for learner in pair:
        learner.end()
    tensors, _ = run.syncer.snapshot()
    status = run.status()

  final = {k: x for part in tensors.theta for k, x in part.items()}
  theta_0 = digest_of(init(cfg))
  assert finished.exit_code == 0
  assert len({*own, theta_0}) == 3
  for each in made:
    assert digest_of(each.first) == theta_0
    assert digest_of(flat(each.params)) == digest_of(final)
  assert digest_of(final) != theta_0
  assert sum(f.version.n for f in status.fragments) >= 16
  assert not [name for name in status.counters if "refused" in name]
  assert not status.alarms


def init(cfg):
  run = dataclasses.replace(cfg.run, seed=5)
  return syncing.init_params(dataclasses.replace(cfg, run=run))


def test_held_out_text_is_the_same_whatever_a_learners_seed():
  # The judge of a run must not depend on who judges.
  cfg = config.freeze(small.get_config())

  a, b = (stream.held_out(cfg.data, 32, 8, 4) for _ in range(2))

  for one, other in zip(a, b, strict=True):
    np.testing.assert_array_equal(one["inputs"], other["inputs"])


# --- an old base -------------------------------------------------------------------

THETA = {"w": np.zeros((4, 5), np.float32)}
RULES = Rules(num_fragments=1, cycle_steps=1, max_open_rounds=1, quorum=1)
DRIFT = 100.0  # Of the global parameters a version; far beyond a local step.
STEP = 0.25


class Slow:
  """A scripted learner that goes on from an old version."""

  def __init__(self, run: Served):
    self.run, self.sync, self.step = run, run.client("slow"), 0
    self.sessions: list[port.Session] = []
    self.notices: queue.SimpleQueue = queue.SimpleQueue()
    self.base: Version | None = None

  def join(self) -> None:
    bases = () if self.base is None else (self.base,)
    self.control = self.sync.join(
      port.Hello(
        learner="slow",
        nonce="one process",
        layout_digest=self.run.layout.digest(),
        bases=bases,
      )
    )
    notices = self.control.notices()
    _, welcome = next(notices)
    self.sessions.append(welcome.session)
    threading.Thread(target=self._hear, args=[notices], daemon=True).start()

  def _hear(self, notices) -> None:
    # The channel may be closed while the stream is read: that ends it here.
    with contextlib.suppress(ServiceError):
      for _, notice in notices:
        self.notices.put(notice)

  def fetch(self) -> dict[str, np.ndarray]:
    header, data = self.sync.fetch(self.sessions[-1], 0, 0, False)
    self.base = header.version
    return codec.decode(data, self.run.layout.fragment(0), header.format)

  def adopt(self) -> None:
    self.control.send(
      events.Applied(fragment=0, version=self.base, step=self.step)
    )

  def hear(self, kind):
    while not isinstance(notice := self.notices.get(timeout=10.0), kind):
      pass
    return notice

  def reply(self, base: dict, local: dict) -> port.PushResult:
    """Reports one step, waits to be asked, and answers from its base."""
    self.step += 1
    self.control.send(events.Reported(step=self.step, counts=(Counts(1, 100),)))
    pull = self.hear(port.PullNotice)
    delta = {path: base[path] - local[path] for path in base}
    data = codec.encode(delta, self.run.layout.fragment(0), "float32")
    header = port.ReplyHeader(
      session=self.sessions[-1],
      fragment=0,
      round=pull.round,
      attempt=pull.attempt,
      base=self.base,
      counts=Counts(1, 100),
      lr_sum=0.0,
      positions=(),
      format="float32",
      num_bytes=len(data),
    )
    return self.sync.push(header, codec.chunks(data, 1 << 20))


def drift(run: Served, to: int) -> None:
  """Another learner alone takes the global fragment far away, then leaves."""
  spoil = Spoil(
    delta=lambda d: {k: np.full_like(x, DRIFT) for k, x in d.items()}
  )
  fast = NumpyLearner(run.client("fast"), "fast", spoil=spoil)
  fast.start()
  wait_for(lambda: version(run) >= to)
  fast.leave()
  wait_for(lambda: run.syncer.status().num_live <= 1)
  wait_for(lambda: not run.syncer.status().rounds)


def version(run: Served) -> int:
  return run.syncer.status().fragments[0].version.n


@pytest.mark.parametrize("reconnects", [False, True])
def test_a_stale_reply_is_its_base_less_its_parameters(reconnects):
  # [N4] From version 3 while the syncer goes to 7 or more; a drift of 400.
  run = Served(THETA, RULES)
  try:
    drift(run, 3)
    slow = Slow(run)
    slow.join()
    base = slow.fetch()
    slow.adopt()
    started = slow.base.n
    if reconnects:
      slow.control.close()
      wait_for(lambda: run.all_of(events.Disconnected))
    drift(run, started + 4)
    if reconnects:
      slow.join()
      assert slow.sessions[0] == slow.sessions[1]
    before = run.theta(0, slow.sessions[-1])["w"]
    local = {"w": base["w"] - np.float32(STEP)}

    result = slow.reply(base, local)
    while slow.hear(port.PublishedNotice).outcome != Outcome.INCLUDED:
      pass
    after = run.theta(0, slow.sessions[-1])["w"]
  finally:
    run.close()

  assert np.abs(before - base["w"]).min() >= 4 * DRIFT
  assert result.outcome == Outcome.ACCEPTED
  np.testing.assert_array_equal(after, before - np.float32(STEP))


def test_a_reply_beyond_the_cap_is_refused_and_told_what_to_do():
  # [N4] Older than max_staleness.
  run = Served(THETA, RULES)
  try:
    slow = Slow(run)
    slow.join()
    base = slow.fetch()
    slow.adopt()
    drift(run, RULES.max_staleness + 1)
    before = run.theta(0, slow.sessions[-1])["w"]

    result = slow.reply(base, {"w": base["w"] - np.float32(STEP)})
    note = slow_note(run)
    after = run.theta(0, slow.sessions[-1])["w"]
    counters = run.syncer.status().counters
  finally:
    run.close()

  assert result.outcome == Outcome.REFUSED
  for text in (result.reason, note):
    assert "take the global fragment" in text
    assert "link" in text
  assert any("stale" in name for name in counters)
  np.testing.assert_array_equal(after, before)


def slow_note(run: Served) -> str:
  said = {m.learner: m.note for m in run.syncer.status().learners}
  return said["slow"]
