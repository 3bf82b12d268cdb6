"""Plain training keeps one run to one directory."""

import json

import pytest

from ddiloco_jax import config
from ddiloco_jax.launch import training
from ddiloco_jax.syncer.errors import InUse


def settings(num_steps, step_s=0.0):
  cfg = config.default()
  cfg.model.num_layers, cfg.model.embed_dim, cfg.model.num_heads = 1, 16, 2
  cfg.train.batch_size, cfg.train.seq_len = 2, 16
  cfg.evaluate.num_windows = 4
  cfg.run.num_steps = num_steps
  cfg.run.log_every_steps = 1
  cfg.run.step_s = step_s
  return config.freeze(cfg)


def train(directory, num_steps, restore):
  return training.run_plain(
    settings(num_steps), directory, lambda: False, restore=restore
  )


def test_a_directory_holds_one_run(tmp_path):
  run = tmp_path / "run"
  with pytest.raises(InUse, match="no run to restore"):
    train(run, 2, restore=True)
  train(run, 2, restore=False)
  lines = (run / "metrics.jsonl").read_text()

  with pytest.raises(InUse, match="already holds a run"):
    train(run, 4, restore=False)
  assert (run / "metrics.jsonl").read_text() == lines

  train(run, 4, restore=True)
  assert (run / "metrics.jsonl").read_text().startswith(lines)


def test_a_step_takes_as_long_as_it_was_told_to(tmp_path):
  cfg = settings(4, step_s=0.15)

  training.run_plain(cfg, tmp_path / "run", lambda: False)

  text = (tmp_path / "run" / "metrics.jsonl").read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  steps = [line["step_s"] for line in lines if "step_s" in line]
  assert min(steps) >= 0.15


def test_d2_two_resumes_keep_the_uninterrupted_order(tmp_path):
  def losses(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(x["step"], x["loss"]) for x in found if "loss" in x]

  train(tmp_path / "whole", 9, restore=False)
  for num_steps in (3, 6, 9):
    train(tmp_path / "parts", num_steps, restore=num_steps > 3)

  whole = losses(tmp_path / "whole")
  assert [step for step, _ in whole] == list(range(1, 10))
  assert losses(tmp_path / "parts") == whole
