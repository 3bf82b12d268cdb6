import functools
import math
from pathlib import Path

import jax
import pytest

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments
from ddiloco_jax.data import stream
from ddiloco_jax.models import transformer

FOLDER = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
SYNCHRONOUS = ("diloco", "fedavg", "fedopt", "streaming_diloco")


def load(name):
  return config.freeze(config.load_file(str(FOLDER / f"{name}.py")))


@functools.cache
def shapes(name):
  """Path -> (shape, dtype) of the model, without making it."""

  model = transformer.make_model(load(name).model)
  tree = jax.eval_shape(lambda: transformer.init_params(model, 0))
  return fragments.shapes_of(fragments.flatten(tree))


def test_the_promised_configs_are_there():
  assert {
    "tiny",
    "base_125m",
    "paper_5b",
    "data_parallel",
    *SYNCHRONOUS,
  } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_consistent_and_survives_json(name):
  cfg = load(name)

  assert config.from_json(config.to_json(cfg)) == cfg
  assert cfg.run.name == name
  assert cfg.run.directory == f"runs/{name}"


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_gives_command_hardware_time_and_loss(name):
  text = (FOLDER / f"{name}.py").read_text().split('"""')[1]

  for word in ("Command:", "Hardware:", "Time:", "Loss:", f"configs/{name}.py"):
    assert word in text


@pytest.mark.parametrize("name", NAMES)
def test_a_config_has_a_layout_with_all_its_fragments(name):
  cfg = load(name)

  layout = fragments.make_layout(
    shapes(name), cfg.fragments.kind, cfg.fragments.num_fragments
  )

  assert layout.num_fragments == cfg.sync.num_fragments
  total = sum(layout.num_params(p) for p in range(layout.num_fragments))
  assert total == sum(math.prod(shape) for shape, _ in shapes(name).values())


@pytest.mark.parametrize(
  ("name", "low", "high"),
  [
    ("tiny", 200e3, 260e3),
    ("base_125m", 120e6, 130e6),
    ("paper_5b", 4.8e9, 5.2e9),
  ],
)
def test_a_model_has_the_size_that_its_config_names(name, low, high):
  count = sum(math.prod(shape) for shape, _ in shapes(name).values())

  assert low < count < high
  assert count == transformer.num_params(load(name).model)


def test_each_tiny_learner_reads_its_text_less_than_once():
  cfg = load("tiny")
  text = stream.load_corpus(cfg.data).training

  windows = len(text) / cfg.train.seq_len / cfg.sync.num_shards

  assert windows > cfg.sync.num_syncer_steps * cfg.train.batch_size


def test_tiny_makes_at_least_a_hundred_steps():
  assert load("tiny").sync.num_syncer_steps >= 100


def test_paper_5b_has_the_paper_settings():
  cfg = load("paper_5b")

  assert (cfg.sync.num_fragments, cfg.sync.cycle_steps) == (24, 24)
  assert (cfg.sync.max_open_rounds, cfg.sync.quorum) == (2, 1)
  assert (cfg.sync.alpha, cfg.merge.direction) == (0.0, "rda")
  assert (cfg.wire.up_format, cfg.train.optimizer) == ("bfloat16", "adamw")


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_the_synchronous_presets_wait_for_everybody(name):
  cfg = load(name)

  assert cfg.sync.wait_for_publication
  assert cfg.sync.quorum == 4
  assert cfg.run.lr_index == "own"
  assert cfg.merge.direction == "average"


def test_data_parallel_takes_the_tokens_of_four_tiny_learners():
  tiny, cfg = load("tiny"), load("data_parallel")

  assert cfg.train.batch_size == 4 * tiny.train.batch_size
  assert cfg.mesh.data == 4
  assert cfg.model == tiny.model
