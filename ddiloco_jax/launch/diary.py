"""A learner's diary: what a replay of its training needs and no tape has.

RUN/learners/ID/steps/N.jsonl, a file for each process: a first line about the
process, then a line for every adoption and every step (index of the learning
rate, data position, metrics), and at its end the digest of its parameters. Only
with `run.record_payloads`. (arXiv 2604.21428, App.)
"""

import itertools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments
from ddiloco_jax.algorithm.digest import digest
from ddiloco_jax.data import stream
from ddiloco_jax.launch import provenance
from ddiloco_jax.training import metrics, trainer
from ddiloco_jax.wire import port


class Diary:
  """Writes one process's file; nothing if payloads are not recorded.

  Args:
    cfg: With the run's own settings in it.
    model: That trains; its parameters have not been used yet.
    run: That it is a learner of.
    directory: Of this learner's diaries.
    resumes: It goes on from parameters that it does not adopt.
  """

  def __init__(
    self,
    cfg: config.Config,
    model: trainer.Trainer,
    run: port.RunSpec,
    directory: pathlib.Path,
    *,
    resumes: bool = False,
  ):
    self._model = model
    self._writer: metrics.MetricsWriter | None = None
    self._is_begun = False
    if not cfg.run.record_payloads:
      return
    numbers = itertools.count()
    paths = (directory / f"{n}.jsonl" for n in numbers)
    path = next(path for path in paths if not path.exists())
    self._path = path
    self._num_kept = 0
    self._writer = metrics.MetricsWriter(path)
    self._writer.write(
      {
        "machine": provenance.machine_type(),
        "libraries": provenance.libraries(),
        "devices": devices(model),
        "data_digest": stream.load_corpus(cfg.data).digest,
        "num_shards": run.num_shards,
        "settings": json.loads(config.to_json(cfg)),
      }
    )

    if resumes:  # Its first change may be a step.
      self._is_begun = True
      self._keep_all(self._writer)

  def note(self, line: dict[str, Any]) -> None:
    """Writes a change of the train state."""
    if self._writer is not None:
      if not self._is_begun:
        self._begin(self._writer)
      line.pop("step_s", None)
      self._writer.write({**line, "moments_age": self._model.moments_age})
      if "start_over" in line:
        self._keep_all(self._writer)

  def _begin(self, writer: metrics.MetricsWriter) -> None:
    """Keeps an inner state that the process took over, wherever from."""
    self._is_begun = True
    if self._model.moments_age:
      self._keep(writer, "inner", self._model.take_inner())

  def _keep_all(self, writer: metrics.MetricsWriter) -> None:
    params = fragments.flatten(jax.device_get(self._model.params))
    self._keep(writer, "params", params)
    self._keep(writer, "inner", self._model.take_inner())

  def _keep(
    self,
    writer: metrics.MetricsWriter,
    what: str,
    arrays: Mapping[str, Any],
  ) -> None:
    self._num_kept += 1
    path = self._path.with_suffix(f".{self._num_kept}.npz")
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    with path.open("xb") as file:
      np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
    writer.write({what: path.name, "digest": digest(arrays)})

  def close(self) -> None:
    """Writes the digest of the parameters, at the end of the process."""
    if self._writer is not None:
      self._writer.write({"digest": params_digest(self._model)})
      self._writer.close()


def devices(model: trainer.Trainer) -> list[str]:
  """The devices of a mesh, by kind."""
  return [device.device_kind for device in model.mesh.devices.flat]


def params_digest(model: trainer.Trainer) -> str:
  """Of a model's parameters; waits for them."""
  return digest(fragments.flatten(jax.device_get(model.params)))
