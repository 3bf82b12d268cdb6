"""What users get wrong: one clear line each, and an exit code of its own."""

import dataclasses
import pathlib
import re
import socket
import zipfile

import numpy as np
import pytest

from ddiloco_jax import config
from ddiloco_jax.launch import arrays, exits, syncing
from ddiloco_jax.syncer.errors import InUse
from ddiloco_jax.wire.status import ServiceError
from tests.support import small
from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.processes import (
  SYNCER,
  TRAIN,
  ending,
  module,
  overrides,
)

SMALL = "--config=tests/support/small.py"


@pytest.fixture
def run(tmp_path):
  """Runs a command to its end: (exit code, what it said)."""
  with ending() as start:

    def to_the_end(name: str, *flags: str, timeout_s: float = 90.0):
      process = start(
        module(name, SMALL, f"--run_dir={tmp_path / 'run'}", *flags),
        tmp_path / "log",
      )
      code = process.wait(timeout_s)
      said = process.said()
      assert "Traceback" not in said, said
      return code, said

    yield to_the_end


def test_a_port_in_use_is_told_with_its_code(run):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    address = f"127.0.0.1:{taken.getsockname()[1]}"

    code, said = run(SYNCER, f"--address={address}")

  assert code == exits.IN_USE
  assert address in said
  assert "in use" in said


def test_a_directory_of_a_live_syncer_is_refused(run, tmp_path):
  with served_run(settings(), tmp_path / "run"):
    code, said = run(SYNCER, "--address=127.0.0.1:0")

  assert code == exits.IN_USE
  assert "locked" in said
  assert "--run_dir" in said


def test_a_directory_that_holds_a_run_is_refused_unless_restored(tmp_path):
  with served_run(settings(), tmp_path / "run"):
    pass

  with pytest.raises(InUse) as caught:
    syncing.SyncerRun(settings(), str(tmp_path / "run"))

  assert "--restore" in str(caught.value)


def test_data_that_is_not_there_is_named(run, tmp_path):
  nowhere = tmp_path / "nowhere" / "*.txt"

  code, said = run(TRAIN, *overrides(data__source=nowhere))

  assert code == exits.BAD_USAGE
  assert str(nowhere) in said


@pytest.mark.parametrize("name", [SYNCER, TRAIN])
def test_a_misspelt_setting_is_told_with_the_nearest(run, name):
  code, said = run(name, *overrides(train__lerning_rate=1.0))

  assert code == exits.BAD_USAGE
  assert "train.lerning_rate" in said
  assert "nearest is 'train.learning_rate'" in said


def test_a_learner_may_not_set_what_the_syncer_owns(run):
  code, said = run(TRAIN, "--syncer=127.0.0.1:1", *overrides(sync__quorum=2))

  assert code == exits.BAD_USAGE
  assert "sync.quorum" in said
  assert "ddiloco_jax.cli.syncer" in said


def test_a_learner_waits_for_its_syncer_and_then_gives_up(run):
  with socket.create_server(("127.0.0.1", 0)) as free:
    address = f"127.0.0.1:{free.getsockname()[1]}"

  code, said = run(
    TRAIN, f"--syncer={address}", *overrides(run__connect_timeout_s=7.0)
  )

  assert code == exits.NO_SYNCER
  waits = re.findall(r"waits for the syncer \(GetRun, (\d+) of 7 s\)", said)
  assert len(waits) >= 2, said
  assert address in said
  assert "limit 7 s" in said
  assert "--syncer" in said


def test_a_model_that_differs_from_the_run_is_told_by_its_first_path(
  run, tmp_path
):
  # Theta 0 from arrays: one of another shape, and a later one missing.
  cfg = config.freeze(small.get_config())
  theta = syncing.init_params(cfg)
  changed, missing = sorted(theta)[1], sorted(theta)[3]
  theta[changed] = np.zeros((3, *theta[changed].shape), np.float32)
  del theta[missing]

  with served_run(cfg, tmp_path / "served", theta=theta) as served:
    code, said = run(TRAIN, f"--syncer={served.address}")
    status = served.status()

  assert code == exits.BAD_USAGE
  assert repr(changed) in said
  assert missing not in said
  assert str(theta[changed].shape) in said
  assert status.learners == ()


@pytest.mark.parametrize("num_fragments", [5, 24])
def test_more_fragments_than_leaves_are_refused(tmp_path, num_fragments):
  cfg = settings(num_fragments=num_fragments, cycle_steps=24)

  with pytest.raises(ValueError, match=str(num_fragments)):
    syncing.SyncerRun(cfg, str(tmp_path), theta={"a": np.zeros(3, np.float32)})


# --- arrays for a model that is not ours -------------------------------------------


def whole(path: pathlib.Path) -> bytes:
  np.savez(path, a=np.arange(1000, dtype=np.float32), b=np.ones(3, np.float32))
  return path.read_bytes()


def cut(path):
  data = whole(path)
  path.write_bytes(data[: len(data) // 2])


def flip(path):
  data = bytearray(whole(path))
  data[1500] ^= 0xFF  # Within the elements: the checksum tells.
  path.write_bytes(data)


def garbage(path):
  path.write_bytes(b"this is no archive")


def single(path):
  with path.open("wb") as file:
    np.save(file, np.zeros(3, np.float32))


def pickled(path):
  np.savez(path, a=np.array([{"an": "object"}], dtype=object))


def integers(path):
  np.savez(path, a=np.arange(3))


def not_finite(path):
  np.savez(path, a=np.array([1.0, np.nan], np.float32))


def nothing(path):
  np.savez(path)


def other_archive(path):
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("a.txt", "no array")


def absent(path):
  pass


@pytest.mark.parametrize(
  "spoil",
  [
    absent,
    cut,
    flip,
    garbage,
    integers,
    not_finite,
    nothing,
    other_archive,
    pickled,
    single,
  ],
)
def test_arrays_that_cannot_be_read_are_bad_usage(tmp_path, spoil):
  path = tmp_path / "theta.npz"
  spoil(path)

  with pytest.raises(ValueError, match=r"--layout_arrays=.*theta\.npz"):
    arrays.load_arrays(str(path))


def test_arrays_that_can_be_read_are_theta_0(tmp_path):
  path = tmp_path / "theta.npz"
  np.savez(path, **{"a/w": np.ones((2, 3), np.float32)})

  loaded = arrays.load_arrays(str(path))

  np.testing.assert_array_equal(loaded["a/w"], np.ones((2, 3)))


def test_a_corrupted_file_of_arrays_has_its_exit_code(run, tmp_path):
  cut(tmp_path / "theta.npz")

  code, said = run(SYNCER, f"--layout_arrays={tmp_path / 'theta.npz'}")

  assert code == exits.BAD_USAGE
  assert "theta.npz" in said
  assert not (tmp_path / "run").exists()


def test_a_tensor_without_elements_is_bad_usage_and_nothing_is_written(
  run, tmp_path
):
  path = tmp_path / "theta.npz"
  np.savez(path, a=np.ones(3, np.float32), z=np.zeros((0, 4), np.float32))

  code, said = run(
    SYNCER,
    f"--layout_arrays={path}",
    *overrides(fragments__num_fragments=1, sync__cycle_steps=4),
  )

  assert code == exits.BAD_USAGE, said
  assert "'z' is of shape (0, 4)" in said
  assert "at least one element" in said
  assert not (tmp_path / "run").exists()


# --- settings of a learner that are not the run's --------------------------------


def test_a_learner_whose_file_says_otherwise_takes_the_syncers_settings(
  run, tmp_path
):
  # [M10] Another P, another H, another model: told once, and it trains.
  editable = small.get_config()
  editable.sync.num_syncer_steps = 25
  cfg = config.freeze(editable)
  file = tmp_path / "other.py"
  file.write_text(
    "from tests.support import small\n\n\n"
    "def get_config():\n"
    "  cfg = small.get_config()\n"
    "  cfg.sync.num_fragments = 2\n"
    "  cfg.sync.cycle_steps = 30\n"
    "  cfg.model.num_layers = 3\n"
    "  return cfg\n"
  )
  theta = syncing.init_params(cfg)
  with served_run(cfg, tmp_path / "served", theta=theta) as served:
    code, said = run(TRAIN, f"--config={file}", f"--syncer={served.address}")
    finished = served.wait(10.0)
    spec = served.syncer.get_run()

  assert code == exits.OK, said
  assert finished.missing == ()
  assert spec.layout.num_fragments == 4
  (line,) = [x for x in said.splitlines() if "the syncer's settings rule" in x]
  for name in ("sync.num_fragments", "sync.cycle_steps", "model.num_layers"):
    assert name in line


def test_a_learner_with_another_layout_is_refused_at_once(tmp_path):
  # [M10] It says so in its hello, and does not hang.
  with served_run(settings(), tmp_path / "run") as run:
    wrong = LoopLearner(run.address, "wrong", paced(0.02), wrap=Otherwise)
    with learners(wrong), pytest.raises(ServiceError, match="layout") as caught:
      wrong.end(10.0)

  assert caught.value.code == "FAILED_PRECONDITION"


class Otherwise:
  """A client of a learner that cuts its model into one fragment."""

  def __init__(self, client):
    self._client = client

  def __getattr__(self, name):
    return getattr(self._client, name)

  def join(self, hello):
    return self._client.join(dataclasses.replace(hello, layout_digest="0" * 64))
