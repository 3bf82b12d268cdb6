"""A learner's diary: what a replay of its training needs and no tape has.

RUN/learners/ID/steps/N.jsonl, a file for each process: a first line about the
process, then a line for every adoption and every step (index of the learning
rate, data position, metrics), and at its end the digest of its parameters. Only
with `run.record_payloads`. (arXiv 2604.21428, App.)
"""

import itertools
import json
import pathlib
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
  """

  def __init__(
    self,
    cfg: config.Config,
    model: trainer.Trainer,
    run: port.RunSpec,
    directory: pathlib.Path,
  ):
    self._model = model
    self._writer: metrics.MetricsWriter | None = None
    self._is_begun = False
    if not cfg.run.record_payloads:
      return
    numbers = itertools.count()
    paths = (directory / f"{n}.jsonl" for n in numbers)
    path = next(path for path in paths if not path.exists())
    self._inner = path.with_suffix(".npz")
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

  def note(self, line: dict[str, Any]) -> None:
    """Writes a change of the train state."""
    if self._writer is not None:
      if not self._is_begun:
        self._begin(self._writer)
      line.pop("step_s", None)
      self._writer.write({**line, "moments_age": self._model.moments_age})

  def _begin(self, writer: metrics.MetricsWriter) -> None:
    """Keeps an inner state that the process took over, wherever from."""
    self._is_begun = True
    if self._model.moments_age:
      inner = {
        path: np.asarray(x) for path, x in self._model.take_inner().items()
      }
      with self._inner.open("xb") as file:
        np.savez(file, **inner)  # pyright: ignore[reportArgumentType]
      writer.write({"inner": self._inner.name, "digest": digest(inner)})

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
