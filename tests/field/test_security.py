"""Learners with certificates and tokens, and a service under attack."""

import contextlib
import dataclasses
import logging
import random
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ddiloco_jax.launch import exits, numpy_model, serving
from ddiloco_jax.learner.client import Client
from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.rules import Rules
from ddiloco_jax.wire.options import WireConfig
from scripts.fuzzing.attacks import Target, attack
from tests.support import processes
from tests.support.numpy_learner import NumpyLearner
from tests.support.over_grpc import THETA as SMALL_THETA
from tests.support.over_grpc import (
  LoopLearner,
  ServedRun,
  paced,
  served_run,
  settings,
)
from tests.support.secured import certs, secured, token_file
from tests.support.served import Served, wait_for

THETA = {"a": np.zeros((3, 4), np.float32), "b": np.zeros(10, np.float32)}
RULES = Rules(
  num_fragments=2,
  cycle_steps=4,
  max_open_rounds=1,
  quorum=1,
  lease_s=10.0,
  max_learners=4,
  num_shards=4,
  min_deadline_s=0.5,
)
NAMES = ("ada", "bob", "mallory", "healthy")
TOKENS = {name: f"the-token-of-{name}-0123456789" for name in NAMES}


def tokens() -> str:
  return token_file(*(f"{name} {token}" for name, token in TOKENS.items()))


def test_a_learner_restarted_five_times_is_in_the_next_merge_each_time():
  # [T9] No merge is without it: the quorum is both.
  cfg = secured(WireConfig(), token_file=tokens())
  rules = dataclasses.replace(RULES, quorum=2)
  run = Served(THETA, rules, cfg=cfg, learner="bob")
  clients = []

  def start(name: str) -> NumpyLearner:
    clients.append(Client(run.address, cfg, learner=name))
    learner = NumpyLearner(clients[-1], name, takeover=True)
    learner.start()
    return learner

  bob = start("bob")
  for _ in range(6):
    ada = start("ada")
    ada.wait_for(lambda ada=ada: ada.num_included() >= 2, 60.0)
    ada.kill()
    clients[-1].close()

  incarnation, lives = 0, []
  for effect in list(run.effects):
    if isinstance(effect, events.Welcome) and effect.learner == "ada":
      incarnation = effect.incarnation
    if isinstance(effect, events.Merge) and incarnation not in lives:
      merged = {(x.key.learner, x.key.incarnation) for x in effect.inputs}
      assert ("ada", incarnation) in merged
      lives.append(incarnation)
  bob.kill()
  clients[0].close()
  run.close()

  assert len(lives) == 6


@contextlib.contextmanager
def numpy_fleet(directory, **sync):
  """A served run with a token for each id; yields it, and what starts a
  learner process of an id."""
  cfg = secured(WireConfig(), token_file=tokens())
  wire = {f"wire__{k}": v for k, v in dataclasses.asdict(cfg).items()}
  theta = numpy_model.init_params(0)
  with (
    served_run(settings(**sync, **wire), directory, theta=theta) as run,
    processes.ending() as start,
  ):

    def learner(name: str) -> processes.Process:
      argv = processes.module(
        "ddiloco_jax.launch.numpy_learner",
        f"--syncer={run.address}",
        f"--learner_id={name}",
        f"--run_dir={directory}",
      )
      return start(argv, directory / f"{name}.log")

    yield run, learner


def test_each_numpy_learner_says_the_token_of_its_own_id(tmp_path):
  with numpy_fleet(tmp_path / "run", quorum=2) as (run, start):
    for learner in [start("ada"), start("bob")]:
      learner.wait_for(
        lambda: min(f.version.n for f in run.status().fragments) >= 1
      )


def test_a_numpy_learner_without_a_line_is_told_so(tmp_path):
  with numpy_fleet(tmp_path / "run") as (_, start):
    eve = start("eve")

    assert eve.wait() == exits.BAD_USAGE
    assert "error: the token file has no line for learner 'eve'" in eve.said()


@contextlib.contextmanager
def serving_again(cfg, directory, address):
  """The run in a directory, served at an address once more."""
  start = serving.Start(cfg, directory, SMALL_THETA)
  with serving.serving(start, address, restore=True) as served:
    run = ServedRun(served, directory)
    try:
      yield run
    finally:
      run.syncer.close()  # As a kill: nobody is told that the run ends.
      run._thread.join(10.0)


def of_node(ca: str = "ca") -> dict[str, str]:
  return {name: certs(ca=ca)[name] for name in ("tls_cert", "tls_key")}


# What the syncer has at first and at last, what for a while, and what is said.
MISTAKES = {
  "other tokens": (
    lambda: {"token_file": token_file("T" * 20)},
    lambda: {"token_file": token_file("U" * 20)},
    lambda: {"token_file": token_file("T" * 20)},
    "wrong token",
  ),
  "tokens where there were none": (
    dict,
    lambda: {"token_file": token_file("U" * 20)},
    dict,
    "no token was sent",
  ),
  "another CA": (
    of_node,
    lambda: of_node("other"),
    certs,
    "is not signed by the CA",
  ),
  "no TLS": (of_node, dict, certs, "does not speak TLS"),
  "TLS where there was none": (dict, of_node, dict, "speaks TLS"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_syncer_back_with_the_wrong_settings_ends_no_learner_that_joined(
  mistake, tmp_path, caplog
):
  right, wrong, of_learner, says = MISTAKES[mistake]

  def cfg_of(wire):
    return settings(quorum=1, **{f"wire__{k}": v for k, v in wire().items()})

  directory = tmp_path / "run"
  start = serving.Start(cfg_of(right), directory, SMALL_THETA)
  with serving.serving(start, "127.0.0.1:0") as served:
    run, address = ServedRun(served, directory), served.address
    wire = WireConfig(**of_learner(), reconnect_max_s=0.3)
    ada = LoopLearner(address, "ada", paced(0.05), wire=wire, max_solo_s=60.0)
    ada.start()
    wait_for(lambda: min(f.version.n for f in run.status().fragments) >= 1)
    run.syncer.close()
    run._thread.join(10.0)
  with caplog.at_level(logging.WARNING):
    with serving_again(cfg_of(wrong), directory, address):
      wait_for(lambda: not ada.is_alive() or says in caplog.text)
      steps = len(ada.steps)
      wait_for(lambda: not ada.is_alive() or len(ada.steps) > steps + 40)
      assert ada.error is None
    with serving_again(cfg_of(right), directory, address) as run:
      wait_for(lambda: run.status().num_training)
      versions = [f.version.n for f in run.status().fragments]
      wait_for(
        lambda: min(f.version.n for f in run.status().fragments) > max(versions)
      )
      ada.kill()
      ada.join(10.0)

  assert says in caplog.text


@hypothesis.settings(
  max_examples=40,
  deadline=None,
  derandomize=True,
  suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(seed=st.integers(0, 2**32))
def play(target: Target, seed: int) -> None:
  """Inputs as hypothesis draws them; a failing one is shrunk and named."""
  rng = random.Random(seed)
  for _ in range(3):
    attack(rng, target)
  assert not target.unexpected


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_syncer_under_attack_serves_on_and_keeps_nothing(caplog):
  cfg = WireConfig(
    call_timeout_s=1.0,
    progress_timeout_s=1.0,
    max_calls=64,
    token_file=tokens(),
  )
  run = Served(THETA, RULES, cfg=cfg, learner="healthy")
  healthy = NumpyLearner(run.sync, "healthy")
  healthy.start()
  healthy.wait_for(lambda: healthy.num_included() >= 2)
  target = Target(run.address, TOKENS["mallory"])

  with caplog.at_level(logging.ERROR):
    play(target)
  target.close()
  included = healthy.num_included()
  healthy.wait_for(lambda: healthy.num_included() >= included + 2)

  def of_callers() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [n for n in names if n in ("first-message", "reads-upload")]

  wait_for(lambda: not of_callers(), 30.0)
  assert not caplog.records
  assert sum(target.num_inputs.values()) >= 100
  healthy.kill()
  run.close()
