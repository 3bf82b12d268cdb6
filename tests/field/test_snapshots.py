"""A consistent snapshot of a run that trains meanwhile, over gRPC."""

import json
import pathlib
from typing import Any

import numpy as np

from ddiloco_jax.algorithm import fragments
from ddiloco_jax.cli import admin
from ddiloco_jax.launch import exits
from ddiloco_jax.learner.client import Client
from ddiloco_jax.training.checkpoint import Checkpoints
from ddiloco_jax.wire import port
from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.served import wait_for


class Part:
  """Keeps a learner's part of a cut in memory."""

  def __init__(self):
    self.parts: dict[int, Any] = {}

  def save(self, part, tell) -> None:
    self.parts[part.record.snapshot] = part
    tell(None)


def test_a_snapshot_is_one_cut_while_the_run_goes_on(
  tmp_path: pathlib.Path, capsys
):
  parts = Part(), Part()
  with served_run(settings(), tmp_path) as run:
    a, b = (
      LoopLearner(run.address, name, paced(0.01), save_cut=part.save)
      for name, part in zip("ab", parts)
    )
    with learners(a, b):
      wait_for(lambda: run.status().num_training == 2)
      for number in (1, 2, 3):
        assert admin.main([run.address, "snapshot", "--json"]) == exits.OK
        reply = json.loads(capsys.readouterr().out)
        manifest = json.loads(
          (tmp_path / "snapshots" / str(number) / "manifest.json").read_text()
        )

        assert reply["snapshot"] == number
        assert sorted(reply["learners"]) == ["a", "b"]
        assert not reply["skipped"]
        assert manifest["path"] == reply["path"]
        clock = [tuple(v) for v in manifest["clock"]]
        for part in parts:
          assert list(part.parts[number].versions) == clock
        merges = sum(n for _, n in clock)
        wait_for(
          lambda m=merges: sum(f.version.n for f in run.status().fragments) > m
        )


def test_the_syncers_part_has_the_bytes_of_its_clock(tmp_path: pathlib.Path):
  with served_run(settings(), tmp_path) as run:
    a = LoopLearner(run.address, "a", paced(0.01))
    with learners(a):
      wait_for(lambda: run.status().fragments[1].version.n > 1)
      over = run.syncer.take_snapshot()

  with Checkpoints(pathlib.Path(over.path) / "syncer", read_only=True) as part:
    params = fragments.flatten(part.restore(0)["params"])
    state = part.records(0)["state"]

  assert tuple(over.skipped) == ("a: it keeps no checkpoints",)
  versions = [tuple(f[0]) for f in state["fragments"]]
  assert versions == [tuple(v) for v in over.clock]
  assert all(np.isfinite(x).all() for x in params.values())


def test_who_asks_in_the_moment_in_which_a_cut_ends_has_it(tmp_path):
  with served_run(settings(lease_s=2.0), tmp_path) as run:
    mute = Client(run.address)
    digest = mute.get_run().layout.digest()
    hello = port.Hello(learner="mute", nonce="n", layout_digest=digest)
    next(iter(mute.join(hello).notices()))
    syncer = run.syncer
    syncer.request_snapshot()
    wait_for(lambda: syncer.state.cut.path)
    with syncer._lock:  # So that its timer does not come first.
      until = syncer.state.cut.until
      wait_for(lambda: syncer._now() >= until)

      over = syncer.take_snapshot()

    mute.close()
  assert over.snapshot == 1
  assert over.skipped[0].startswith("mute: ")
