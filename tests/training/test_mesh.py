"""Where arrays live, and that it does not matter to what is computed."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from ddiloco_jax.training.mesh import MeshConfig, make_mesh, sharding, shardings

ROOT = pathlib.Path(__file__).parents[2]


def test_sharded_training_and_restoring_equal_one_device(tmp_path):
  # [C2]
  # The number of devices is fixed once JAX has started: another process.
  done = subprocess.run(
    [
      sys.executable,
      "-W",
      "error",
      pathlib.Path(__file__).with_name("on_eight_devices.py"),
      tmp_path,
    ],
    capture_output=True,
    text=True,
    env={
      **os.environ,
      "PYTHONPATH": str(ROOT),
      "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    },
  )

  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == "all checks passed"


def test_moments_live_where_their_parameters_do():
  mesh = make_mesh(MeshConfig())
  params = {"layers_0": {"mlp": {"gate": np.zeros((4, 6))}}}
  state = optax.adam(1e-3).init(params)

  places = shardings(state, mesh)

  gate = places[0].nu["layers_0"]["mlp"]["gate"]
  assert gate.spec == P("fsdp", "tensor")
  assert places[0].count.spec == P()


@pytest.mark.parametrize(
  ("path", "shape", "spec"),
  [
    ("embedding", (10, 8), P("tensor", "fsdp")),
    ("layers_3/attention/query", (8, 4, 2), P("fsdp", "tensor", None)),
    ("layers/attention/query", (5, 8, 4, 2), P(None, "fsdp", "tensor", None)),
    ("layers/mlp_norm/scale", (5, 8), P()),
    ("somebody/elses/kernel", (8, 8), P()),
  ],
)
def test_paths_have_their_published_places(path, shape, spec):
  mesh = make_mesh(MeshConfig())

  assert sharding(path, shape, mesh).spec == spec


def test_too_few_devices_are_an_error_that_counts_them():
  count = len(jax.devices())

  with pytest.raises(ValueError, match=rf"needs {2 * count} .* are {count}"):
    make_mesh(MeshConfig(fsdp=count, tensor=2))


def test_an_empty_axis_is_refused():
  with pytest.raises(ValueError, match=r"mesh\.fsdp is 0"):
    MeshConfig(fsdp=0)
