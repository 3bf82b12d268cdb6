"""A learner's part of a consistent cut: all that its loop knows at a boundary.

The train state apart, which its trainer saves. Whoever is given both goes on
as the same process would have. (arXiv 2604.21428, App. E.)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ddiloco_jax.algorithm.fragments import Fragment
from ddiloco_jax.learner.anchor import Anchor
from ddiloco_jax.protocol import events, saved
from ddiloco_jax.wire import port as ports

Arrays = dict[int, Fragment]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Anchored:
  """An anchor, its base apart."""

  version: events.Version
  counts: events.Counts
  lr_sum: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
  """A copy that waits for a publication, its arrays apart."""

  fragment: int
  boundary: int
  counts: events.Counts
  lr_sum: float
  positions: tuple[events.Position, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
  """What `Shards` knows.

  Attributes:
    following: Per shard, the next batch; the shard to read now comes first.
    used_up: Shards without another batch.
    returned: Shards that were given up since the process began.
  """

  following: tuple[events.Position, ...]
  used_up: tuple[events.Position, ...] = ()
  returned: tuple[events.Position, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
  """What of a part is no array.

  Attributes:
    run_id: Of the run that was cut.
    snapshot: The cut's number there.
    nonce: Of the process.
    step: Its own, at the boundary.
    first: The step that it began from.
    reads: Its data shards.
    index: Of the schedule, as ScheduleIndex keeps it.
    anchors: Of every fragment.
    copies: Of a learner that waits for publications.
  """

  run_id: str
  snapshot: int
  nonce: str
  step: int
  first: int
  reads: Reads
  index: tuple[int, ...]
  anchors: tuple[Anchored, ...] = ()
  copies: tuple[Copied, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
  """A part: its record, and the arrays that it speaks of.

  Attributes:
    bases: Fragment -> what it trains from.
    copies: Fragment -> the copy that waits, float32.
  """

  record: Record
  bases: Arrays
  copies: Arrays

  @property
  def versions(self) -> tuple[events.Version, ...]:
    return tuple(anchor.version for anchor in self.record.anchors)

  def anchor(self, p: int) -> Anchor:
    """Of a fragment, as it was."""
    of = self.record.anchors[p]
    anchor = Anchor(self.bases[p], of.version)
    anchor.counts, anchor.lr_sum = of.counts, of.lr_sum
    return anchor

  def waiting(self) -> dict[int, tuple[int, ports.Copy]]:
    """Fragment -> (boundary, copy) of the copies that wait."""
    return {
      of.fragment: (
        of.boundary,
        ports.Copy(
          arrays=self.copies[of.fragment],
          base=self.bases[of.fragment],
          base_version=self.versions[of.fragment],
          counts=of.counts,
          lr_sum=of.lr_sum,
          positions=of.positions,
        ),
      )
      for of in self.record.copies
    }

  def report(self) -> events.Reported:
    """Of its boundary."""
    record, reads = self.record, self.record.reads
    return events.Reported(
      step=record.step,
      counts=tuple(anchor.counts for anchor in record.anchors),
      positions=tuple(sorted((*reads.following, *reads.used_up))),
      returned=tuple(sorted(reads.returned)),
      boundaries=tuple((of.fragment, of.boundary) for of in record.copies),
    )


def keep(
  record: Record,
  anchors: Mapping[int, Anchor],
  boundaries: Mapping[int, int],
  copies: Mapping[int, ports.Copy],
) -> Part:
  """A part of a loop at a boundary; its bases are shared, and read only.

  Args:
    record: Without anchors and copies.
    anchors: Of every fragment.
    boundaries: Fragment -> where a copy was made that waits.
    copies: Fragment -> copy; those that do not wait can be made again.
  """
  waiting = [p for p in sorted(boundaries) if p in copies]
  anchored = [anchors[p] for p in sorted(anchors)]
  record = dataclasses.replace(
    record,
    anchors=tuple(
      Anchored(version=a.version, counts=a.counts, lr_sum=a.lr_sum)
      for a in anchored
    ),
    copies=tuple(
      Copied(
        fragment=p,
        boundary=boundaries[p],
        counts=copies[p].counts,
        lr_sum=copies[p].lr_sum,
        positions=copies[p].positions,
      )
      for p in waiting
    ),
  )
  return Part(
    record=record,
    bases={p: anchor.base for p, anchor in anchors.items()},
    copies={
      p: {k: np.array(x, np.float32) for k, x in copies[p].arrays.items()}
      for p in waiting
    },
  )


def to_json(record: Record) -> dict[str, Any]:
  return saved.encode(record)


def from_json(values: Any) -> Record:
  """The record that `to_json` was given.

  Raises:
    ValueError: it is of another release, or damaged.
  """
  return saved.decode(Record, values)
