"""A learner's inner optimizer state as bytes and header, and back.

Leaves follow each other in their own dtype; what comes off the wire must have
exactly the leaves that the receiver has itself. (arXiv 2604.21428, App. E.)
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ddiloco_jax.protocol import events
from ddiloco_jax.wire import codec, fields, transfer
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb

Shapes = Mapping[str, tuple[tuple[int, ...], str]]  # Path -> (shape, dtype).


class OtherState(ValueError):
  """A peer's state has not the leaves that this learner has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
  """One boundary's copy of what a donor gives.

  Attributes:
    step: The donor's.
    clock: What it trained from there, per fragment.
    arrays: By path; read only.
  """

  donor: str
  step: int
  clock: tuple[events.Version, ...]
  arrays: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
  """What a state has to be to be the one that was asked for.

  Attributes:
    clock: It trained from these versions or later ones, per fragment.
    donor: Whose it is; "": the syncer chose.
    but_not: Whose it is not.
  """

  clock: Sequence[events.Version] = ()
  donor: str = ""
  but_not: Collection[str] = ()

  def read_clock(self, header: pb.StateHeader) -> tuple[events.Version, ...]:
    """The clock of a header.

    Raises:
      ServiceError: INVALID_ARGUMENT, it is of another donor or clock.
    """
    name = "StateHeader.donor_id"
    donor = fields.learner_from_pb(name, header.donor_id)
    if donor in self.but_not or (self.donor and donor != self.donor):
      raise fields.invalid(
        name, f"{donor!r}, who was not asked; {self.donor or 'another'} was"
      )
    fields.natural("StateHeader.step", header.step)
    clock = _read_clock("StateHeader.clock", header.clock, len(self.clock))
    for fragment, (have, wanted) in enumerate(zip(clock, self.clock)):
      if have.n < wanted.n:
        raise fields.invalid(
          "StateHeader.clock",
          f"{have.n} for fragment {fragment}; {wanted.n} or later was asked for",
        )
    return clock


def parts(state: State, chunk_bytes: int) -> Iterator[transfer.Part]:
  """The parts of a transfer; reads the arrays from their device."""
  arrays = {path: np.asarray(x) for path, x in state.arrays.items()}
  header = pb.StateHeader(
    donor_id=state.donor,
    step=state.step,
    clock=[fields.version_to_pb(version) for version in state.clock],
    leaves=[
      pb.StateLeaf(path=path, dtype=x.dtype.name, shape=x.shape)
      for path, x in arrays.items()
    ],
    num_bytes=sum(x.nbytes for x in arrays.values()),
  )

  def chunks() -> Iterator[memoryview]:
    for x in arrays.values():
      flat = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
      yield from codec.chunks(flat.data, chunk_bytes)

  return transfer.send(pb.StateChunk, header, chunks())


def receive(
  incoming: Iterator[transfer.Part],
  shapes: Shapes,
  asked: Asked,
  moved: Callable[[], object] = lambda: None,
) -> State:
  """Collects a transfer whole; its checksum has passed.

  Args:
    shapes: The leaves that the receiver has.
    asked: What the header has to be.
    moved: Called whenever bytes have arrived; an empty chunk has none.

  Raises:
    OtherState: the donor has other leaves; names the first that differs.
    ServiceError: the transfer broke, is malformed, or was not asked for.
  """
  header = transfer.receive_header(incoming)
  moved()
  clock = asked.read_clock(header)
  _check(header, shapes)
  buffer, at = bytearray(header.num_bytes), 0
  for chunk in transfer.receive_chunks(incoming, header.num_bytes):
    buffer[at : at + len(chunk)] = chunk
    at += len(chunk)
    if len(chunk):
      moved()
  arrays, at = {}, 0
  for leaf in header.leaves:
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    count = int(np.prod(shape, dtype=np.int64))
    array = np.frombuffer(buffer, dtype, count, at)
    arrays[leaf.path] = array.reshape(shape)
    at += array.nbytes
  return State(
    donor=header.donor_id,
    step=header.step,
    clock=clock,
    arrays=arrays,
  )


def num_bytes(shapes: Shapes) -> int:
  """What the leaves take, and a header has to announce."""
  return sum(
    int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    for shape, dtype in shapes.values()
  )


def clock_from_pb(
  request: pb.FetchStateRequest, num_fragments: int
) -> tuple[events.Version, ...]:
  """Raises ServiceError, INVALID_ARGUMENT, for what is malformed."""
  return _read_clock("FetchStateRequest.clock", request.clock, num_fragments)


def _read_clock(
  name: str, clock: Sequence[pb.Version], num_fragments: int
) -> tuple[events.Version, ...]:
  if len(clock) != num_fragments:
    raise fields.invalid(
      name,
      f"a list of {len(clock)}; it has one version for each of the run's"
      f" {num_fragments} fragments, as in Welcome",
    )
  return tuple(fields.read_version(name, version) for version in clock)


def _check(header: pb.StateHeader, shapes: Shapes) -> None:
  theirs = {
    leaf.path: (tuple(leaf.shape), leaf.dtype) for leaf in header.leaves
  }
  for path in sorted(theirs.keys() | shapes.keys()):
    mine, other = shapes.get(path), theirs.get(path)
    if mine is None or other is None or mine != other:
      raise OtherState(
        f"the state of {header.donor_id} and this learner's differ first at"
        f" {path!r}: {other or 'nothing'} there, {mine or 'nothing'} here"
        " (shape, dtype); both must have one model and one inner optimizer"
      )
  implied = num_bytes(shapes)
  if len(header.leaves) != len(shapes) or header.num_bytes != implied:
    raise OtherState(
      f"the state of {header.donor_id} has {len(header.leaves)} leaves in"
      f" {header.num_bytes} bytes; {len(shapes)} in {implied} are expected"
    )
