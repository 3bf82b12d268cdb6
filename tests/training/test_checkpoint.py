"""Checkpoints: complete or absent, bit-equal, of the structure asked for."""

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from ddiloco_jax.training.checkpoint import CheckpointError, Checkpoints

ROOT = pathlib.Path(__file__).parents[2]
PARAMS = {
  "layers_0": {"mlp": {"gate": np.arange(12, dtype=np.float32).reshape(3, 4)}},
  "layers_1": {"mlp": {"gate": np.ones((3, 4), np.float32)}},
  "scale": np.ones(4, np.float32),
}
OPTIMIZERS = {
  "adamw": optax.adamw(1e-2),
  "nesterov": optax.sgd(1e-2, momentum=0.9, nesterov=True),
  "stateless": optax.sgd(1e-2),
  "masked": optax.masked(
    optax.adam(1e-2),
    {"layers_0": True, "layers_1": False, "scale": True},
  ),
  "multi_transform": optax.multi_transform(
    {"a": optax.adam(1e-2), "b": optax.sgd(1e-2, momentum=0.9)},
    {"layers_0": "a", "layers_1": "b", "scale": "a"},
  ),
  "chain": optax.chain(
    optax.clip(1.0), optax.scale_by_adam(mu_dtype=jnp.bfloat16), optax.scale(-1)
  ),
}


def run_python(code, *arguments):
  return subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )


def assert_equal(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  jax.tree.map(np.testing.assert_array_equal, one, other)
  jax.tree.map(lambda a, b: _same_dtype(a, b), one, other)


def _same_dtype(a, b):
  assert a.dtype == b.dtype


def test_trees_and_records_come_back(tmp_path):
  spec = {"quorum": 3, "alpha": 0.5, "names": ["a", None, True]}
  outer = {"0": {"layers_0/mlp/gate": np.full(3, 2.5, np.float32)}}

  with Checkpoints(tmp_path / "made" / "here") as saved:
    assert saved.latest() is None
    saved.save(5, {"params": PARAMS, "outer": outer}, {"spec": spec})
    saved.wait()

    assert saved.latest() == 5
    assert saved.records(5) == {"spec": spec}
    assert_equal(saved.restore(5), {"params": PARAMS, "outer": outer})
    assert_equal(saved.restore(5, {"outer": outer}), {"outer": outer})


def test_params_open_in_plain_orbax(tmp_path):
  with Checkpoints(tmp_path) as saved:
    saved.save(5, {"params": PARAMS}, {"spec": {"a": 1}})

  found = ocp.StandardCheckpointer().restore(tmp_path / "5" / "params", PARAMS)

  assert_equal(found, PARAMS)
  assert json.loads((tmp_path / "5" / "spec" / "metadata").read_text()) == {
    "a": 1
  }


def test_what_is_saved_is_what_was_given_whatever_happens_to_it(tmp_path):
  host = {"x": np.full(4_000_000, 1.0, np.float32)}
  device = {"x": jnp.full(4_000_000, 1.0)}
  clobber = jax.jit(lambda x: x * 0, donate_argnums=0)

  with Checkpoints(tmp_path) as saved:
    saved.save(1, {"host": host, "device": device})
    host["x"].fill(0)
    jax.block_until_ready(clobber(device["x"]))
    saved.wait()
    found = saved.restore(1)

  np.testing.assert_array_equal(found["host"]["x"], 1.0)
  np.testing.assert_array_equal(found["device"]["x"], 1.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_optimizer_state_is_a_fresh_ones_twin(tmp_path, name):
  # [C6]
  tx, traces = OPTIMIZERS[name], []

  @jax.jit
  def step(params, state):
    traces.append(1)
    updates, state = tx.update(
      jax.tree.map(jnp.ones_like, params), state, params
    )
    return optax.apply_updates(params, updates), state

  params = jax.tree.map(jnp.asarray, PARAMS)
  fresh = jax.jit(tx.init)(params)
  params, state = step(params, fresh)
  with Checkpoints(tmp_path) as saved:
    saved.save(1, {"params": params, "inner": state})
    saved.wait()
    found = saved.restore(1, {"params": params, "inner": fresh})

  assert_equal(found["inner"], state)
  expected = step(params, state)
  traced = len(traces)
  assert_equal(step(found["params"], found["inner"]), expected)
  assert len(traces) == traced, "a restored state traces the step again"


def test_a_deeper_model_is_refused_by_its_first_differing_path(tmp_path):
  # [C5]
  def model(num_layers, width=4):
    gate = np.zeros((3, width), np.float32)
    return {f"layers_{i}": {"mlp": {"gate": gate}} for i in range(num_layers)}

  with Checkpoints(tmp_path) as saved:
    saved.save(1, {"params": model(4)})
    saved.wait()

    with pytest.raises(ValueError, match=r"nothing at layers_4/mlp/gate"):
      saved.restore(1, {"params": model(6)})
    with pytest.raises(
      ValueError, match=r"float32 \(3, 4\) at layers_2/mlp/gate, where nothing"
    ):
      saved.restore(1, {"params": model(2)})
    with pytest.raises(
      ValueError, match=r"\(3, 4\) at layers_0/mlp/gate, where float32 \(3, 5\)"
    ):
      saved.restore(1, {"params": model(4, width=5)})
    with pytest.raises(ValueError, match=r"no tree 'outer'.*\['params'\]"):
      saved.restore(1, {"outer": model(4)})


def test_what_cannot_be_saved_is_refused_at_once(tmp_path):
  with Checkpoints(tmp_path) as saved:
    saved.save(1, {"params": PARAMS})
    with pytest.raises(ValueError, match="step 1 is already saved"):
      saved.save(1, {"params": PARAMS})
    with pytest.raises(ValueError, match="'spec' is not strict JSON"):
      saved.save(2, {"params": PARAMS}, {"spec": {"x": float("nan")}})
    with pytest.raises(ValueError, match="'params' is used twice"):
      saved.save(2, {"params": PARAMS}, {"params": {}})
    with pytest.raises(ValueError, match="no complete step 7"):
      saved.restore(7)

    assert saved.steps() == [1]


def test_older_steps_are_deleted(tmp_path):
  with Checkpoints(tmp_path, max_to_keep=2) as saved:
    for step in (1, 2, 3):
      saved.save(step, {"params": PARAMS})

  assert Checkpoints(tmp_path).steps() == [2, 3]


def test_a_full_disk_is_loud_once_and_keeps_the_step_before(tmp_path):
  rng = np.random.default_rng(0)
  large = {"x": rng.standard_normal(500_000)}
  unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
  saved = Checkpoints(tmp_path)
  saved.save(1, {"params": PARAMS})
  saved.wait()

  resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, unlimited[1]))
  try:
    saved.save(2, {"params": large})
    with pytest.raises(CheckpointError) as error:
      saved.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

  assert str(tmp_path) in str(error.value)
  assert "complete steps are kept" in str(error.value)
  assert saved.latest() == 1
  saved.save(3, {"params": large})
  saved.close()
  assert Checkpoints(tmp_path).steps() == [1, 3]
  assert_equal(Checkpoints(tmp_path).restore(3)["params"], large)


@pytest.fixture
def unwritable():
  """A directory, and a function that makes it read-only even for root."""
  path = pathlib.Path(tempfile.mkdtemp())  # tmp_path's parents are private.
  user = os.geteuid()

  def lock():
    for directory in (path, *path.iterdir()):
      directory.chmod(0o555)
    if user == 0:
      os.seteuid(65534)

  yield path, lock
  os.seteuid(user)
  path.chmod(0o755)
  shutil.rmtree(path)


def test_a_read_only_directory_is_loud_and_keeps_the_step_before(unwritable):
  path, lock = unwritable
  saved = Checkpoints(path)
  saved.save(1, {"params": PARAMS})
  saved.wait()

  lock()
  with pytest.raises(CheckpointError, match=r"writable|Permission") as error:  # noqa: PT012
    saved.save(2, {"params": PARAMS})  # Or in the background: see wait.
    saved.wait()

  assert str(path) in str(error.value)
  assert saved.latest() == 1
  with pytest.raises(CheckpointError, match="save step 2"):
    Checkpoints(path / "new").save(2, {"params": PARAMS})


def test_a_save_that_was_killed_is_skipped_and_cleaned(tmp_path):
  done = run_python(
    """
    import os, signal, sys
    import numpy as np
    from ddiloco_jax.training.checkpoint import Checkpoints

    saved = Checkpoints(sys.argv[1])
    saved.save(1, {"params": {"x": np.ones(4, np.float32)}})
    saved.wait()
    rng = np.random.default_rng(0)
    large = {str(i): rng.standard_normal(1_000_000) for i in range(20)}
    saved.save(2, {"params": large})
    os.kill(os.getpid(), signal.SIGKILL)
    """,
    tmp_path,
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  left = {path.name for path in tmp_path.iterdir()}
  assert len(left) == 2, "the kill came too late to leave anything behind"

  watcher = Checkpoints(tmp_path, read_only=True)
  assert watcher.latest() == 1
  watcher.restore(1)
  assert {path.name for path in tmp_path.iterdir()} == left

  with Checkpoints(tmp_path) as saved:
    assert saved.latest() == 1
    np.testing.assert_array_equal(saved.restore(1)["params"]["x"], 1)
    saved.save(2, {"params": PARAMS})
  assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}


def test_a_newer_format_is_refused(tmp_path):
  with Checkpoints(tmp_path) as saved:
    saved.save(1, {"params": PARAMS})
  record = tmp_path / "1" / "contents" / "metadata"
  record.write_text(record.read_text().replace('"format": 1', '"format": 2'))

  with pytest.raises(
    ValueError, match="format 2, but this program reads up to"
  ):
    Checkpoints(tmp_path).restore(1)
