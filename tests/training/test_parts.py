"""Copies taken out of a donated state, and arrays put into it."""

import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco_jax.training.parts import put, take

PATHS = ("layers_0/mlp/gate", "head", "scale")


def make_params():
  return {
    "layers_0": {"mlp": {"gate": jnp.ones((64, 64))}},
    "head": jnp.ones((32, 8), jnp.bfloat16),
    "scale": jnp.ones(()),
  }


@jax.jit
def advance(params, i):
  return jax.tree.map(lambda x: (x * 0.999 + i).astype(x.dtype), params)


donating = jax.jit(advance.__wrapped__, donate_argnums=0)


def aligned(values):
  """Host memory at a multiple of 64 bytes, which device_put aliases on CPU."""
  values = np.asarray(values)
  room = np.empty(values.nbytes + 64, np.uint8)
  start = -room.ctypes.data % 64
  out = room[start : start + values.nbytes].view(values.dtype)
  out = out.reshape(values.shape)
  out[...] = values
  return out


def test_copies_keep_their_step_through_1000_donated_steps():
  # [C7]
  inbox, kept, failed = queue.Queue(), [], []

  def read():
    try:
      while (copies := inbox.get()) is not None:
        kept.append({path: np.array(x) for path, x in copies.items()})
    except BaseException as error:  # Raised below, on the main thread.
      failed.append(error)

  reader = threading.Thread(target=read)
  reader.start()
  params = make_params()
  for i in range(1000):
    inbox.put(take(params, PATHS))
    old, params = params, donating(params, i)
    assert old["layers_0"]["mlp"]["gate"].is_deleted()
  inbox.put(None)
  reader.join()

  assert not failed
  expected = make_params()
  for i, copies in enumerate(kept):
    np.testing.assert_array_equal(
      copies["layers_0/mlp/gate"], expected["layers_0"]["mlp"]["gate"]
    )
    np.testing.assert_array_equal(copies["head"], expected["head"])
    np.testing.assert_array_equal(copies["scale"], expected["scale"])
    expected = advance(expected, i)
  assert len(kept) == 1000


def test_what_was_put_does_not_follow_the_buffer_it_came_from():
  params = make_params()
  buffer = aligned(np.full((64, 64), 3.0, np.float32))

  params = put(params, {"layers_0/mlp/gate": buffer})
  buffer[:] = np.nan

  np.testing.assert_array_equal(params["layers_0"]["mlp"]["gate"], 3.0)


def test_a_step_after_put_does_not_write_into_the_buffer():
  buffer = aligned(np.full((64, 64), 3.0, np.float32))

  params = put(make_params(), {"layers_0/mlp/gate": buffer})
  donating(params, 1)["head"].block_until_ready()

  assert params["layers_0"]["mlp"]["gate"].is_deleted()
  np.testing.assert_array_equal(buffer, 3.0)


def test_put_rounds_to_the_dtype_of_the_tree():
  values = np.full((32, 8), 1.2345678, np.float32)

  params = put(make_params(), {"head": values})

  assert params["head"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(params["head"], jnp.bfloat16(1.2345678))


def test_put_leaves_the_given_tree_and_other_arrays_alone():
  before = make_params()

  after = put(before, {"scale": np.float32(5)})

  assert float(before["scale"]) == 1
  assert float(after["scale"]) == 5
  assert after["head"] is before["head"]
  assert jax.tree.structure(after) == jax.tree.structure(before)


def test_take_then_put_is_the_identity():
  before = make_params()

  after = put(before, jax.tree.map(np.asarray, take(before, PATHS)))

  equal = jax.tree.map(np.array_equal, after, before)
  assert jax.tree.leaves(equal) == [True] * 3


@pytest.mark.parametrize(
  ("path", "shape", "words"),
  [
    ("layers_0/mlp/up", (), ["layers_0/mlp/up", "'up'", "gate"]),
    ("head/kernel", (), ["head/kernel", "'kernel'"]),
    ("head", (8, 32), ["head", "(32, 8)", "(8, 32)"]),
  ],
)
def test_what_does_not_fit_is_refused_by_its_path(path, shape, words):
  with pytest.raises(ValueError) as error:
    put(make_params(), {path: np.zeros(shape)})

  for word in words:
    assert word in str(error.value)
