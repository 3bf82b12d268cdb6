"""Runs one learner's training again, from its diary and a replay of Theta.

Every adoption puts the very version that was served then, done again by
`replaying`; every step takes the batch and the index of the learning rate that
the diary names, through the learner's own trainer. Compared are the metrics of
every step, and the parameters at the end. (arXiv 2604.21428, App.)
"""

import collections
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments
from ddiloco_jax.algorithm.digest import digest
from ddiloco_jax.data import stream
from ddiloco_jax.launch import diary, provenance, training
from ddiloco_jax.launch.replaying import Name, ThetaReplay
from ddiloco_jax.learner.learner import put_blend
from ddiloco_jax.protocol import events
from ddiloco_jax.syncer.payloads import read_npz
from ddiloco_jax.training import metrics
from ddiloco_jax.wire import codec

Lines = list[dict[str, Any]]


class LearnerReplay:
  """Retraces all processes of one learner.

  Args:
    run_dir: Of a run that was started with `record_payloads`.
    learner: Its id.

  Attributes:
    num_processes: Retraced, from their first adoption to their last line.
    num_steps: Done again, and their metrics compared.
    num_ends: Processes whose last parameters were compared.
    faults: Sentences; what differs.
    gaps: Sentences; what cannot be done again.
    notes: Sentences; another machine, other libraries.
    params: Of the newest process, path -> array.

  Raises:
    ValueError: there is no diary of this learner.
  """

  def __init__(self, run_dir: pathlib.Path, learner: str):
    directory = run_dir / "learners" / learner / "steps"
    paths = sorted(directory.glob("*.jsonl"), key=lambda path: int(path.stem))
    if not paths:
      raise ValueError(
        f"{directory} has no diary of learner {learner!r}: it is written where"
        " the run was started with --record_payloads"
      )
    self._diaries = [(path, list(_read(path))) for path in paths]
    self.theta = ThetaReplay(run_dir)
    self._versions = _Versions(self.theta, [x for _, x in self._diaries])
    self.num_processes = self.num_steps = self.num_ends = 0
    self.faults: list[str] = []
    self.gaps: list[str] = []
    self.notes: list[str] = []
    self.params: Mapping[str, np.ndarray] = {}

  def run(self) -> None:
    """Retraces every process; the first difference ends it."""
    for path, lines in self._diaries:
      if lines and not self.faults:
        self._retrace(path, lines)
    self.faults += self.theta.faults
    self.notes += [x for x in self.theta.notes if x not in self.notes]

  def _retrace(self, path: pathlib.Path, lines: Lines) -> None:
    where = f"{path.parent.parent.name}/steps/{path.name}"
    head, *changes = lines
    cfg = config.freeze(head["settings"])
    for note in provenance.differences(head["machine"], head["libraries"]):
      if note not in self.notes:
        self.notes.append(note)
    model = training.make_trainer(cfg, seed=None)
    if fault := _cannot(head, cfg, model):
      self.gaps.append(f"{where}: {fault}")
      return
    batches = training.batches_of(cfg, head["num_shards"])
    shards: dict[int, Any] = {}
    for number, line in enumerate(changes, start=2):
      if "adopt" in line:
        fresh = self._versions.get(line, cfg.wire.down_format)
        if fresh is None:
          self.gaps.append(
            f"{where}, line {number}: it adopted version {line['version']} of"
            f" fragment {line['adopt']}, which the replay of Theta does not"
            " come to"
          )
          return
        put_blend(model, fresh, line["alpha"])
      elif "inner" in line:
        model.put_inner(_read_kept(path.parent / line["inner"], line["digest"]))
      elif "params" in line:
        model.put(_read_kept(path.parent / line["params"], line["digest"]))
      elif "start_over" in line:
        continue  # The state that it went on with is in the next lines.
      elif "step" in line:
        shard, position = line["place"]
        if shard not in shards:
          shards[shard] = batches(shard)
        found = model.step(shards[shard](position), line["index"])
        if self._differs(f"{where}, line {number}", line, found, model):
          return
        self.num_steps += 1
      elif line.get("digest") == (found := diary.params_digest(model)):
        self.num_ends += 1
      else:
        self.faults.append(
          f"{where}, line {number}: the parameters have the digest {found} done"
          f" again, and {line.get('digest')} in the diary"
        )
        return
    self.num_processes += 1
    self.params = fragments.flatten(model.params)

  def _differs(
    self, where: str, line: Mapping[str, Any], found: Any, model: Any
  ) -> bool:
    if line["moments_age"] != model.moments_age:
      self.gaps.append(
        f"{where}: its moments are {line['moments_age']} steps old and those"
        f" done again {model.moments_age}: it took over a state that was"
        " not recorded"
      )
      return True
    # As they are written: a number that is not finite becomes null.
    again = json.loads(metrics.strict_json({**found, "step": line["step"]}))
    names = [x for x in again if x != "step_s" and again[x] != line.get(x)]
    if names:
      self.faults.append(
        f"{where}: step {line['step']} has the {names[0]}"
        f" {again[names[0]]!r} done again, and {line.get(names[0])!r} in the"
        " diary"
      )
    return bool(names)


class _Versions:
  """The versions that a learner adopted, as they were served.

  Walks Theta only as far as is asked for, and forgets what is not asked again.
  """

  def __init__(self, theta: ThetaReplay, diaries: list[Lines]):
    self._theta = theta
    self._walk = theta.versions()
    self._wanted: collections.Counter[Name] = collections.Counter(
      _name(line) for lines in diaries for line in lines if "adopt" in line
    )
    self._kept: dict[Name, Mapping[str, np.ndarray]] = {}

  def get(
    self, line: Mapping[str, Any], down_format: str
  ) -> Mapping[str, np.ndarray] | None:
    """What an adoption put; None if the replay does not come to it."""
    name = _name(line)
    while name not in self._kept:
      replayed = next(self._walk, None)
      if replayed is None:
        return None
      found = replayed.fragment, replayed.version
      if self._wanted[found]:
        self._kept[found] = replayed.theta
    self._wanted[name] -= 1
    theta = self._kept[name]
    if not self._wanted[name]:
      del self._kept[name]
    leaves = self._theta.layout.fragment(name[0])
    served = "float32" if line["exact"] else down_format
    return codec.decode(codec.encode(theta, leaves, served), leaves, served)


def _name(line: Mapping[str, Any]) -> Name:
  return line["adopt"], events.Version(*line["version"])


def _read(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  """The lines of a diary; a torn last one is what a kill left of it.

  Raises:
    ValueError: another line is no JSON.
  """
  for number, text in enumerate(path.read_bytes().split(b"\n"), start=1):
    if not text:
      continue
    try:
      yield json.loads(text)
    except ValueError as error:
      if path.read_bytes().endswith(text):
        return
      raise ValueError(
        f"{path}, line {number}: {error}; take another copy of the file"
      ) from error


def _read_kept(path: pathlib.Path, expected: str) -> dict[str, np.ndarray]:
  """A state that a process took over.

  Raises:
    ValueError: it is not what was written.
  """
  try:
    inner = read_npz(path)
  except ValueError as error:
    raise ValueError(f"{path}: {error}; take another copy of it") from error
  if digest(inner) != expected:
    raise ValueError(
      f"{path} has the digest {digest(inner)}, and the diary says {expected}:"
      " take another copy of it"
    )
  return inner


def _cannot(head: Mapping[str, Any], cfg: config.Config, model: Any) -> str:
  """Why a process cannot be retraced here; "" if it can."""
  if head["devices"] != diary.devices(model):
    return (
      f"it trained on {head['devices']}, and here are"
      f" {diary.devices(model)}: sums would be taken in another order"
    )
  found = stream.load_corpus(cfg.data).digest
  if head["data_digest"] != found:
    return (
      f"its data had the digest {head['data_digest']}, and data.source gives"
      f" {found} here: put the same text there"
    )
  return ""
