import dataclasses
import json
import operator
from pathlib import Path

import pytest
from absl import flags

from ddiloco_jax import config

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs" / "tiny.py")


def parse(*arguments, file=TINY):
  """A command line with --config, as a program would see it."""
  argv = ["program", f"--config={file}", *arguments]
  values = flags.FlagValues()
  config.define_flag(values, argv)
  values(argv)
  return values


def settings(*arguments):
  return config.parsed(parse(*arguments))


# --- overrides (G1) ----------------------------------------------------------


@pytest.mark.parametrize(
  ("override", "name", "expected"),
  [
    ("--config.sync.quorum=2", "sync.quorum", 2),
    ("--config.train.learning_rate=0.25", "train.learning_rate", 0.25),
    ("--config.train.learning_rate=1", "train.learning_rate", 1.0),
    ("--config.train.learning_rate=1e-3", "train.learning_rate", 1e-3),
    ("--config.model.remat", "model.remat", True),
    ("--config.model.remat=true", "model.remat", True),
    ("--noconfig.outer.nesterov", "outer.nesterov", False),
    ("--config.outer.nesterov=false", "outer.nesterov", False),
    ("--config.data.num_epochs=3", "data.num_epochs", 3),
    ("--config.data.num_epochs=None", "data.num_epochs", None),
    ("--config.outer.eps=1", "outer.eps", 1.0),
    ("--config.wire.up_format=float32", "wire.up_format", "float32"),
    (
      "--config.merge.average_paths=('a','b*')",
      "merge.average_paths",
      ("a", "b*"),
    ),
    ("--config.merge.average_paths=()", "merge.average_paths", ()),
    ("--config.merge.average_paths=head", "merge.average_paths", ("head",)),
    ("--config.run.directory=/some/where", "run.directory", "/some/where"),
  ],
)
def test_an_override_has_the_type_of_its_setting(override, name, expected):
  value = operator.attrgetter(name)(settings(override))

  assert value == expected
  assert type(value) is type(expected)


def test_overrides_add_up():
  cfg = settings("--config.sync.quorum=2", "--config.sync.alpha=1")

  assert (cfg.sync.quorum, cfg.sync.alpha) == (2, 1.0)


def test_the_number_of_fragments_is_one_setting_with_two_names():
  by_one = settings("--config.sync.num_fragments=8")
  by_other = settings("--config.fragments.num_fragments=8")

  assert by_one == by_other
  assert by_one.sync.num_fragments == by_one.fragments.num_fragments == 8


@pytest.mark.parametrize(
  ("override", "words"),
  [
    ("--config.sync.quorun=2", ["'sync.quorun'", "nearest is 'sync.quorum'"]),
    ("--config.train.quorum=2", ["nearest is 'sync.quorum'", "batch_size"]),
    ("--config.snyc.quorum=2", ["nearest is 'sync.quorum'", "Sections are"]),
    ("--config.quorum=2", ["nearest is 'sync.quorum'"]),
    ("--noconfig.model.remta", ["nearest is 'model.remat'"]),
    ("--config.sync=2", ["'sync' is a section", "sync.quorum"]),
    ("--config.sync.quorum=2.5", ["config.sync.quorum", "2.5"]),
    ("--config.sync.quorum=many", ["config.sync.quorum", "many"]),
    ("--config.model.remat=7", ["config.model.remat", "7"]),
  ],
)
def test_a_wrong_override_is_an_error_that_helps(override, words):
  with pytest.raises(flags.IllegalFlagValueError) as error:
    parse(override)

  for word in words:
    assert word in str(error.value)


def test_a_missing_file_is_an_error_that_names_the_nearest():
  with pytest.raises(flags.IllegalFlagValueError, match=r"'tiny\.py'"):
    parse(file=TINY.replace("tiny", "tinny"))


def test_no_file_at_all_is_an_error():
  values = flags.FlagValues()
  config.define_flag(values, ["program"])
  values(["program"])

  assert config.overridden(values) == ()
  with pytest.raises(ValueError, match="--config is missing"):
    config.parsed(values)


def test_what_was_set_on_the_command_line_is_told_by_name():
  values = parse(
    "--config.sync.quorum=2",
    "--config.run.name=x",
    "--config.wire.chunk_bytes=1000",
    "--config.wire.bandwidth_bytes_per_s=5",
  )

  names = config.overridden(values)

  assert names == (
    "sync.quorum",
    "run.name",
    "wire.chunk_bytes",
    "wire.bandwidth_bytes_per_s",
  )
  assert config.syncer_owned(names) == ("sync.quorum", "wire.chunk_bytes")


def test_settings_are_locked_after_parsing():
  values = parse()

  with pytest.raises(AttributeError):
    values["config"].value.sync.quorun = 2
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.parsed(values).sync.quorum = 2


def test_a_config_file_cannot_set_what_does_not_exist(tmp_path):
  path = tmp_path / "bad.py"
  path.write_text(
    "from ddiloco_jax.config import default\n"
    "def get_config():\n"
    "  cfg = default()\n"
    "  cfg.sync.quorun = 2\n"
    "  return cfg\n"
  )

  with pytest.raises(ValueError, match="quorum") as error:
    config.load_file(str(path))

  assert str(path) in str(error.value)


# --- freeze -------------------------------------------------------------------


def test_the_defaults_are_those_of_the_modules():
  assert config.freeze(config.default()) == config.Config()


def test_what_is_left_out_has_its_default():
  assert config.freeze({"sync": {"quorum": 3}}).sync.quorum == 3
  assert config.freeze({"sync": {"quorum": 3}}).train == config.Config().train


@pytest.mark.parametrize(
  ("section", "name", "value", "words"),
  [
    ("sync", "quorum", True, ["True", "bool", "type int"]),
    ("sync", "quorum", 2.0, ["2.0", "float", "type int"]),
    ("sync", "quorum", None, ["None", "type int"]),
    ("sync", "alpha", True, ["True", "finite float"]),
    ("sync", "alpha", "1", ["'1'", "finite float"]),
    ("train", "learning_rate", float("nan"), ["nan", "finite float"]),
    ("train", "learning_rate", float("inf"), ["inf", "finite float"]),
    ("model", "remat", 1, ["1 (int)", "type bool"]),
    ("run", "name", 5, ["5 (int)", "type str"]),
    ("data", "num_epochs", 1.5, ["1.5", "type int or None"]),
    ("data", "num_epochs", True, ["True", "type int or None"]),
    ("merge", "average_paths", "head", ["'head'", "tuple[str, ...]"]),
    ("merge", "average_paths", ["a", 1], ["average_paths[1]", "type str"]),
  ],
)
def test_a_value_of_another_type_is_refused(section, name, value, words):
  with pytest.raises(ValueError) as error:
    config.freeze({section: {name: value}})

  assert str(error.value).startswith(f"{section}.{name}")
  for word in words:
    assert word in str(error.value)


def test_an_int_becomes_a_float_and_a_list_a_tuple():
  cfg = config.freeze(
    {"sync": {"alpha": 1}, "merge": {"average_paths": ["a", "b"]}}
  )

  assert type(cfg.sync.alpha) is float
  assert cfg.merge.average_paths == ("a", "b")


def test_an_unknown_section_is_refused():
  with pytest.raises(ValueError, match="Sections are data"):
    config.freeze({"synk": {"quorum": 1}})


def test_a_section_must_be_one():
  with pytest.raises(ValueError, match="sync is 5: it must be a section"):
    config.freeze({"sync": 5})


@pytest.mark.parametrize(
  ("values", "inequality"),
  [
    (
      {"sync": {"cycle_steps": 8}},
      "fragments.num_fragments <= sync.cycle_steps",
    ),
    (
      {"sync": {"num_fragments": 8}},
      "sync.num_fragments == fragments.num_fragments",
    ),
    (
      {"sync": {"quorum": 5, "max_learners": 4}},
      "sync.quorum <= sync.max_learners",
    ),
    (
      {"sync": {"max_learners": 5, "num_shards": 4}},
      "sync.max_learners*sync.shards_per_learner <= sync.num_shards",
    ),
    (
      {"sync": {"shards_per_learner": 2}},
      "sync.max_learners*sync.shards_per_learner <= sync.num_shards",
    ),
    (
      {"run": {"standby_lease_s": 30.0, "max_solo_s": 30.0}},
      "run.standby_lease_s < run.max_solo_s",
    ),
    (
      {"sync": {"lease_s": 20.0, "quorum_timeout_s": 10.0}},
      "sync.lease_s < sync.quorum_timeout_s",
    ),
    (
      {"sync": {"lease_s": 15}, "wire": {"reconnect_max_s": 15}},
      "wire.reconnect_max_s < sync.lease_s",
    ),
    (
      {"sync": {"lease_s": 15}, "run": {"max_solo_s": 10}},
      "sync.lease_s < run.max_solo_s",
    ),
  ],
)
def test_settings_that_contradict_each_other_are_refused(values, inequality):
  with pytest.raises(ValueError, match="contradict each other") as error:
    config.freeze(values)

  left, _, right = inequality.split()
  assert inequality in str(error.value)
  assert f"{left}=" in str(error.value)
  assert f"{right}=" in str(error.value)


@pytest.mark.parametrize(
  ("section", "name", "value"),
  [
    ("sync", "quorum", 0),
    ("sync", "alpha", 1.5),
    ("sync", "members", "all"),
    ("sync", "pace", "mean"),
    ("sync", "stale", "keep"),
    ("sync", "lease_s", 0),
    ("sync", "num_tokens", -1),
    ("data", "held_out_every", 1),
    ("data", "num_epochs", 0),
    ("run", "seed", -1),
    ("run", "lr_index", "mine"),
    ("run", "max_to_keep", 0),
    ("model", "vocab_size", 255),
    ("wire", "up_format", "float16"),
    ("train", "batch_size", 0),
  ],
)
def test_a_value_out_of_range_is_refused(section, name, value):
  with pytest.raises(ValueError) as error:
    config.freeze({section: {name: value}})

  assert f"{section}.{name}" in str(error.value)
  assert repr(value) in str(error.value)
  assert "must be" in str(error.value)


# --- as text --------------------------------------------------------------------


def test_settings_survive_json_with_the_same_digest():
  cfg = settings(
    "--config.train.learning_rate=0.1",
    "--config.data.num_epochs=2",
    "--config.merge.average_paths=('é','b')",
    "--config.outer.eps=1e-30",
  )

  text = config.to_json(cfg)
  again = config.from_json(text)

  assert again == cfg
  assert config.to_json(again) == text
  assert config.digest(again) == config.digest(cfg)
  assert len(config.digest(cfg)) == 64


def test_other_settings_have_another_digest():
  assert config.digest(settings()) != config.digest(
    settings("--config.train.learning_rate=0.1")
  )


def test_json_does_not_depend_on_the_order_of_its_keys():
  cfg = settings()
  values = json.loads(config.to_json(cfg))
  turned = json.dumps(dict(reversed(values.items())))

  assert config.digest(config.from_json(turned)) == config.digest(cfg)


def test_json_that_is_no_object_is_refused():
  with pytest.raises(ValueError, match="settings is"):
    config.from_json("[1]")


def test_an_unknown_key_in_json_is_refused():
  with pytest.raises(ValueError, match=r"nearest is 'sync\.quorum'"):
    config.from_json('{"sync": {"quorun": 1}}')


# --- what the syncer owns -----------------------------------------------------------


def test_a_learner_takes_the_syncers_part_and_keeps_its_own():
  syncer = settings(
    "--config.sync.num_fragments=6",
    "--config.wire.up_format=float32",
    "--config.model.num_layers=3",
    "--config.run.name=at_the_syncer",
    "--config.train.batch_size=4",
  )
  learner = settings("--config.train.batch_size=16", "--config.run.name=mine")

  taken, changed = config.with_shared(learner, config.shared_json(syncer))

  assert set(changed) == {
    "sync.num_fragments",
    "fragments.num_fragments",
    "wire.up_format",
    "model.num_layers",
  }
  for section in ("sync", "fragments", "merge", "outer", "model"):
    assert getattr(taken, section) == getattr(syncer, section)
  assert taken.wire == syncer.wire
  assert (taken.train, taken.run) == (learner.train, learner.run)


def test_a_learner_that_agrees_changes_nothing():
  cfg = settings()

  assert config.with_shared(cfg, config.shared_json(cfg)) == (cfg, ())
