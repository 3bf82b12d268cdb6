"""A learner's part of a cut comes back as it was, or is refused by name."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments
from ddiloco_jax.launch import cuts, starting, training
from ddiloco_jax.learner import part as parts
from ddiloco_jax.learner.anchor import Anchor
from ddiloco_jax.protocol import events
from ddiloco_jax.syncer import manifest
from ddiloco_jax.syncer.files import OsFiles
from ddiloco_jax.wire import port
from tests.support import small

RUN, NAME, NUMBER = "small-0", "ada", 3
POSITIONS = (events.Position(0, 7),)


@pytest.fixture(scope="module")
def cfg():
  return config.freeze(small.get_config())


@pytest.fixture(scope="module")
def model(cfg):
  return training.make_trainer(cfg, seed=1)


@pytest.fixture(scope="module")
def spec(cfg, model):
  shapes = fragments.shapes_of(fragments.flatten(model.params))
  shapes["scale"] = (), "float32"
  layout = fragments.make_layout(shapes, "balanced", 2)
  origin = starting.Origin(RUN, NUMBER)
  return starting.run_spec(cfg, layout, "small-1", 2, origin)


def make_part(spec):
  rng = np.random.default_rng(0)

  def some(p):
    return {
      x.path: rng.normal(size=x.shape).astype(np.float32)
      for x in spec.layout.fragment(p)
    }

  anchors = {p: Anchor(some(p), events.Version(1, 4 + p)) for p in (0, 1)}
  for anchor in anchors.values():
    anchor.add(100, 0.1)
    anchor.add(90, 0.3)
  copy = port.Copy(
    arrays=some(1),
    base=anchors[1].base,
    base_version=anchors[1].version,
    counts=events.Counts(1, 100),
    lr_sum=0.1,
    positions=POSITIONS,
  )
  record = parts.Record(
    run_id=RUN,
    snapshot=NUMBER,
    nonce="n",
    step=12,
    first=2,
    reads=parts.Reads(
      following=(events.Position(2, 5), events.Position(0, 7)),
      used_up=(events.Position(1, 9),),
    ),
    index=(13, 11, 2),
  )
  return parts.keep(record, anchors, {1: 11}, {0: copy, 1: copy})


@pytest.fixture
def saved(tmp_path, model, spec):
  """(path of the cut, of the learner's part, what was saved)."""
  directory = tmp_path / "learners" / NAME
  part, told = make_part(spec), []
  kept = cuts.Cuts(directory, model)
  kept.save(part, told.append)
  kept.close()
  assert told == [None]
  cut = tmp_path / "snapshots" / str(NUMBER)
  return cut, directory / "snapshots" / str(NUMBER), part


def test_a_part_comes_back_as_it_was(cfg, model, spec, saved):
  cut, _, part = saved
  other = training.make_trainer(cfg, seed=2)

  found = cuts.restore(cut.with_name("latest"), NAME, spec, other)

  assert found is not None
  assert found.record == part.record
  for mine, theirs in ((found.bases, part.bases), (found.copies, part.copies)):
    assert mine.keys() == theirs.keys()
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    assert jax.tree.map(np.shape, mine) == jax.tree.map(np.shape, theirs)
  jax.tree.map(np.testing.assert_array_equal, other.state, model.state)
  assert found.report().counts == (events.Counts(2, 190),) * 2
  assert [at for at, _ in found.waiting().values()] == [11]


def test_a_learner_that_was_not_in_the_cut_has_no_part(model, spec, saved):
  assert cuts.restore(saved[0], "bob", spec, model) is None


@pytest.mark.parametrize("change", ["bit", "missing", "no seal"])
def test_a_damaged_part_is_refused_by_name(model, spec, saved, change):
  cut, path, _ = saved
  victim = max(
    (p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
  )
  if change == "bit":
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
  else:
    victim = victim if change == "missing" else path / "seal.json"
    victim.unlink()

  with pytest.raises(ValueError, match=victim.name):
    cuts.restore(cut, NAME, spec, model)


@pytest.mark.parametrize(
  ("origin", "said"),
  [
    (("", 0), "began afresh"),
    ((RUN, 4), "began from snapshot 4 of run small-0"),
    (("other-0", NUMBER), "is of run small-0"),
  ],
)
def test_a_part_of_another_cut_is_refused(model, spec, saved, origin, said):
  run_id, number = origin
  other = dataclasses.replace(
    spec, origin_run_id=run_id, origin_snapshot=number
  )

  with pytest.raises(ValueError, match=said):
    cuts.restore(saved[0], NAME, other, model)


def test_a_part_in_the_place_of_another_one_is_refused(model, spec, saved):
  cut, path, _ = saved
  shutil.copytree(path, path.with_name("4"))
  other = dataclasses.replace(spec, origin_snapshot=4)

  with pytest.raises(ValueError, match="is of snapshot 3"):
    cuts.restore(cut.with_name("4"), NAME, other, model)


def test_a_part_must_be_of_the_versions_of_the_manifest(model, spec, saved):
  cut, path, part = saved
  cut.mkdir(parents=True)
  over = events.SnapshotOver(snapshot=NUMBER, clock=part.versions)
  manifest.write(cut.parent.parent, over, OsFiles())
  assert cuts.restore(cut, NAME, spec, model)

  older = tuple(events.Version(1, v.n - 1) for v in part.versions)
  over = dataclasses.replace(over, clock=older)
  manifest.write(cut.parent.parent, over, OsFiles())
  with pytest.raises(ValueError, match=f"{path} is of the versions"):
    cuts.restore(cut, NAME, spec, model)


@pytest.mark.parametrize(
  ("where", "said"),
  [
    ("snapshots", "Check that the directory is writable"),
    (f"snapshots/{NUMBER}/seal.json/in the way", "directory"),
  ],
)
def test_a_part_that_cannot_be_written_is_told_and_logged(
  tmp_path, model, spec, caplog, where, said
):
  (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
  (tmp_path / where).write_text("in the way")
  part, told = make_part(spec), []
  kept = cuts.Cuts(tmp_path, model)

  kept.save(part, told.append)
  kept.close()

  assert len(told) == 1
  assert said in told[0]
  ours = [r.getMessage() for r in caplog.records if r.name == cuts.__name__]
  assert ours == [f"not in snapshot {NUMBER}: {told[0]}"]
