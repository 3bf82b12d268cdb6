"""Does every merge of a run again, as its tapes say, and compares bit for bit.

A merge goes through the code that the syncer's merge worker goes through, with
the recorded replies, in the taped order and with the taped weights. What is
compared: the digest of every version with the one on the tape, the tensors that
each epoch began with, and the checkpoints. (arXiv 2604.21428, App.)
"""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments, outer
from ddiloco_jax.algorithm.digest import digest
from ddiloco_jax.launch import provenance
from ddiloco_jax.protocol import events, machine, tape
from ddiloco_jax.protocol.lines import Head
from ddiloco_jax.report.chronicle import tapes_of
from ddiloco_jax.syncer.merger import merge_deltas
from ddiloco_jax.syncer.payloads import PayloadReader, recorded_epochs
from ddiloco_jax.training.checkpoint import CheckpointError, Checkpoints
from ddiloco_jax.wire import codec

Name = tuple[int, events.Version]  # A fragment and its version.


class Replayed(NamedTuple):
  """A version of a fragment, done again; `theta` is read only."""

  fragment: int
  version: events.Version
  theta: Mapping[str, np.ndarray]


class ThetaReplay:
  """Walks through a run's versions, in the order of its tapes.

  Args:
    run_dir: Of a run that was started with `record_payloads`.

  Attributes:
    num_merges: Done again so far.
    num_compared: Of them, those whose digest was on the tape.
    num_checkpoints: Compared, every fragment of them.
    num_epochs: Done again so far.
    faults: Sentences; what differs. The first one ends the walk.
    gaps: Sentences; what cannot be done again, as it is not there.
    notes: Sentences; another machine, other libraries.
    theta: Per fragment, as far as was walked.
    layout: Of the model, once an epoch has begun.
  """

  def __init__(self, run_dir: pathlib.Path):
    self.run_dir = run_dir
    self.num_merges = self.num_compared = 0
    self.num_checkpoints = self.num_epochs = 0
    self.faults: list[str] = []
    self.gaps: list[str] = []
    self.notes: list[str] = []
    self.theta: list[Mapping[str, np.ndarray]] = []
    self._outer: list[Any] = []
    self._names: dict[Name, tuple[str, str]] = {}  # Digests: Theta, outer.
    self._payloads: PayloadReader | None = None
    self._lost: set[int] = set()  # Fragments that cannot go on in this epoch.
    self._state: machine.State | None = None
    self._has_merged = False
    self._epochs: list[int] = []  # Of the tapes so far.
    # Listed before the tapes: what a syncer that runs writes next is not ours.
    self._saved = Checkpoints(run_dir / "checkpoints", read_only=True)
    with _reading(self._saved.directory):
      self._steps = self._saved.steps()
    self._recorded = recorded_epochs(run_dir / "payloads")
    self._tapes = tapes_of(run_dir)

  def versions(self) -> Iterator[Replayed]:
    """Every version that an epoch began with, or merged.

    Raises:
      TapeError: a tape is damaged before its last line.
      DamagedPayload: a payload file is.
      ValueError: a tape's settings, tensors that are not theirs, or a
        checkpoint that cannot be read.
    """
    with self._saved:
      for path in self._tapes:
        yield from self._walk(path)
        if self.faults:
          return
      for epoch in sorted(self._recorded - {*self._epochs}):
        self.gaps.append(
          f"epoch {epoch} has payloads, and no tape of it has a whole header"
        )
      self._compare_checkpoints()

  def _walk(self, path: pathlib.Path) -> Iterator[Replayed]:
    reader = tape.Reader(path)
    for line in reader.lines():
      yield from self._begin(reader)
      if line.fault:
        self.faults.append(f"{path.name}, {line.fault}")
      elif not self.faults:
        yield from self._do(path.name, line)
      if self.faults:
        return
    yield from self._begin(reader)
    if reader.fault:
      self.faults.append(f"{path.name}, {reader.fault}")
    elif path.name not in ("tape.jsonl", f"tape.{self._epochs[-1]}.jsonl"):
      self.faults.append(
        f"{path.name} is of epoch {self._epochs[-1]}: a tape that is set aside"
        " is named for its epoch"
      )

  def _begin(self, reader: tape.Reader) -> Iterator[Replayed]:
    """Starts an epoch from its recorded tensors; again: does nothing."""
    head, state = reader.head, reader.start
    assert head is not None
    assert state is not None
    if state is self._state or self.faults:
      return
    newest = max(self._epochs, default=0)
    if head.epoch <= newest:
      self.faults.append(
        f"{reader.path.name} is of epoch {head.epoch}, and a tape before it of"
        f" epoch {newest}: it is a copy, or out of its place"
      )
      return
    self._epochs.append(head.epoch)
    self._state, self._lost = state, set()
    self._payloads = PayloadReader(self.run_dir / "payloads", head.epoch)
    if not self._payloads.has_start:
      self._payloads = None
      self.gaps.append(
        f"epoch {head.epoch} has no recorded start: it was run without"
        " --record_payloads, or its disk was full"
      )
      return
    cfg = config.freeze(head.settings)
    self._note(provenance.differences(head.machine, head.libraries))
    start = self._payloads.start()
    self.layout = _layout_of(cfg, start)
    self._cfg, self._tx = cfg.merge, outer.make_outer(cfg.outer)
    self.theta, self._outer = _tensors_of(start, self.layout, self._tx)
    for p, fragment in enumerate(state.fragments):
      was = self._names.get((p, fragment.version))
      yield self._keep(p, fragment.version)
      if was is None:
        self._say_new(head, p, fragment.version)
      elif was != self._names[p, fragment.version]:
        where = f"epoch {head.epoch} began with"
        self.faults.append(
          f"{where} {_describe(p, fragment.version)}, of other bits than the"
          " replay gives"
        )
    self.num_epochs += 1

  def _say_new(self, head: Head, p: int, version: events.Version) -> None:
    """Says why an epoch may not begin with a version that nothing led to."""
    where = f"epoch {head.epoch} began with {_describe(p, version)}"
    if version == events.Version(head.epoch, 0):  # Nothing was saved yet.
      if self._has_merged:
        self.faults.append(f"{where}, afresh, and the tapes before have merges")
    elif not self.gaps and not self._began_from_cut(head):
      self.gaps.append(f"{where}, which no tape before has a merge of")

  def _began_from_cut(self, head: Head) -> bool:
    """Whether an epoch can have begun with the versions of another run.

    Only checkpoints say so, and all of them do.
    """
    if self._has_merged:
      return False
    for step in self._steps_left():
      with _reading(self._saved.directory / str(step)):
        spec = self._saved.records(step)["spec"]
        if spec["run_id"] == head.run_id and spec.get("origin", [""])[0]:
          return True
    return False

  def _do(self, tape_name: str, line: tape.Line) -> Iterator[Replayed]:
    if isinstance(line.event, events.Merged):
      self._has_merged = True
      self._compare(f"{tape_name}, line {line.number}", line.event)
    for effect in line.effects:
      if isinstance(effect, events.Merge) and self._payloads is not None:
        yield from self._merge(self._payloads, effect)

  def _merge(
    self, payloads: PayloadReader, effect: events.Merge
  ) -> Iterator[Replayed]:
    p = effect.fragment
    leaves = self.layout.fragment(p)
    deltas = []
    for item in effect.inputs:
      recorded = payloads.get(item.key)
      if recorded is None:
        self._lost.add(p)
        return
      deltas.append(codec.decode(recorded.data, leaves, recorded.format))
    merged = merge_deltas(self.layout, self._cfg, effect, deltas)
    self.theta[p], self._outer[p] = outer.step(
      self._tx, self.theta[p], merged, self._outer[p]
    )
    self.num_merges += 1
    yield self._keep(p, effect.version)

  def _compare(self, where: str, event: events.Merged) -> None:
    """Compares what was published with the same version done again."""
    what = _describe(event.fragment, event.version)
    if self._payloads is None:
      return
    if event.fragment in self._lost:
      self._payloads = None  # One sentence an epoch is enough.
      self.gaps.append(
        f"{where}: {what} was published, and its replies were not recorded"
      )
      return
    found, _ = self._names[event.fragment, event.version]
    if event.digest and found != event.digest:
      self.faults.append(
        f"{where}: {what} has the digest {found} done again, and"
        f" {event.digest} on the tape"
      )
    self.num_compared += bool(event.digest)

  def _keep(self, p: int, version: events.Version) -> Replayed:
    state = dict(provenance.outer_leaves(self._outer[p]))
    self._names[p, version] = digest(self.theta[p]), digest(state)
    return Replayed(p, version, self.theta[p])

  def _note(self, notes: tuple[str, ...]) -> None:
    self.notes += [note for note in notes if note not in self.notes]

  def _compare_checkpoints(self) -> None:
    """Compares what was saved of the versions that were done again."""
    if not self._names:
      return  # There is nothing to compare it with.
    for step in self._steps_left():
      with _reading(self._saved.directory / str(step)):
        digests = self._read_saved(step)
      self._compare_saved(step, digests)

  def _steps_left(self) -> list[int]:
    """The checkpoints that a syncer that runs has not deleted since."""
    return sorted({*self._steps} & {*self._saved.steps()})

  def _read_saved(self, step: int) -> dict[Name, str]:
    """The versions of a checkpoint, and the digests of their Theta."""
    assert self._state is not None
    record = self._saved.records(step)["state"]
    params = fragments.flatten(self._saved.restore(step)["params"])
    state = machine.load(self._state.rules, record)
    return {
      (p, fragment.version): digest(
        {leaf.path: params[leaf.path] for leaf in self.layout.fragment(p)}
      )
      for p, fragment in enumerate(state.fragments)
    }

  def _compare_saved(self, step: int, digests: Mapping[Name, str]) -> None:
    lacking = ""
    for name, found in digests.items():
      if name not in self._names:
        lacking = lacking or _describe(*name)
      elif found != self._names[name][0]:
        self.faults.append(
          f"checkpoint {step}: {_describe(*name)} is of other bits than the"
          " replay gives"
        )
    if lacking:
      self.gaps.append(f"checkpoint {step} holds {lacking}, not done again")
    else:
      self.num_checkpoints += 1


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
  """Makes a checkpoint that cannot be read a ValueError with its name."""
  try:
    yield
  except (CheckpointError, LookupError, ValueError) as error:
    raise ValueError(
      f"{path} cannot be read: {error.__cause__ or error!r}; take another copy"
      " of it, or move it away to replay without it"
    ) from error


def _layout_of(
  cfg: config.Config, start: Mapping[str, np.ndarray]
) -> fragments.Layout:
  thetas = provenance.named(start, "theta")
  params = {path: x for part in thetas.values() for path, x in part.items()}
  return fragments.make_layout(
    fragments.shapes_of(params),
    cfg.fragments.kind,
    cfg.fragments.num_fragments,
  )


def _tensors_of(
  start: Mapping[str, np.ndarray],
  layout: fragments.Layout,
  tx: optax.GradientTransformation,
) -> tuple[list[Mapping[str, np.ndarray]], list[Any]]:
  """Theta and outer states out of what `name_tensors` made."""
  thetas = provenance.named(start, "theta")
  states = provenance.named(start, "outer")
  theta: list[Mapping[str, np.ndarray]] = [
    thetas[p] for p in range(layout.num_fragments)
  ]
  outers = []
  for p, part in enumerate(theta):
    tree = jax.tree.structure(outer.init(tx, part))
    leaves = states.get(p, {})
    outers.append(
      jax.tree.unflatten(tree, [leaves[str(i)] for i in range(len(leaves))])
    )
  return theta, outers


def _describe(p: int, version: events.Version) -> str:
  return f"version {version.n} (epoch {version.epoch}) of fragment {p}"
