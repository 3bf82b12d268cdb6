"""What opens and answers a bulk transfer, as domain types and as messages.

(arXiv 2604.21428, Sec. 3.)
"""

import math

from ddiloco_jax.wire import fields, port
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb


def reply_header_to_pb(header: port.ReplyHeader) -> pb.ReplyHeader:
  return pb.ReplyHeader(
    learner_id=header.session.learner,
    incarnation=header.session.incarnation,
    session_secret=header.session.secret,
    fragment=header.fragment,
    round=header.round,
    attempt=header.attempt,
    base=fields.version_to_pb(header.base),
    counts=fields.counts_to_pb(header.counts),
    lr_sum=header.lr_sum,
    positions=[
      fields.position_to_pb(position) for position in header.positions
    ],
    format=fields.FORMATS[header.format],
    num_bytes=header.num_bytes,
  )


def reply_header_from_pb(header: pb.ReplyHeader) -> port.ReplyHeader:
  """Raises ServiceError, INVALID_ARGUMENT, for what is malformed."""
  lr_sum = header.lr_sum
  if not (math.isfinite(lr_sum) and lr_sum >= 0):
    raise fields.invalid(
      "ReplyHeader.lr_sum", f"{lr_sum}; it is finite and at least 0 (not said)"
    )
  return port.ReplyHeader(
    session=fields.session_from_pb("ReplyHeader", header),
    fragment=fields.natural("ReplyHeader.fragment", header.fragment),
    round=fields.natural("ReplyHeader.round", header.round),
    attempt=fields.natural("ReplyHeader.attempt", header.attempt),
    base=fields.version_from_pb("ReplyHeader", header, "base"),
    counts=fields.counts_from_pb("ReplyHeader", header, "counts"),
    lr_sum=lr_sum,
    positions=fields.positions_from_pb("ReplyHeader", header.positions),
    format=fields.format_from_pb(header.format),
    num_bytes=fields.natural("ReplyHeader.num_bytes", header.num_bytes),
  )


def push_result_to_pb(result: port.PushResult) -> pb.PushOutcome:
  return pb.PushOutcome(
    outcome=fields.OUTCOMES[result.outcome],
    reason=result.reason,
    first=fields.OUTCOMES[result.first] if result.first else None,
  )


def push_result_from_pb(result: pb.PushOutcome) -> port.PushResult:
  return port.PushResult(
    outcome=fields.outcome_from_pb("PushOutcome.outcome", result.outcome),
    reason=result.reason,
    first=fields.outcome_from_pb("PushOutcome.first", result.first)
    if result.first
    else None,
  )


def fetch_to_pb(
  session: port.Session, fragment: int, n: int, exact: bool
) -> pb.FetchRequest:
  return pb.FetchRequest(
    learner_id=session.learner,
    incarnation=session.incarnation,
    session_secret=session.secret,
    fragment=fragment,
    n=n,
    exact=exact,
  )


def fetch_from_pb(
  request: pb.FetchRequest,
) -> tuple[port.Session, int, int, bool]:
  """The arguments of Synchronizer.fetch."""
  return (
    fields.session_from_pb("FetchRequest", request),
    fields.natural("FetchRequest.fragment", request.fragment),
    fields.natural("FetchRequest.n", request.n),
    request.exact,
  )


def fragment_header_to_pb(header: port.FragmentHeader) -> pb.FragmentHeader:
  return pb.FragmentHeader(
    fragment=header.fragment,
    version=fields.version_to_pb(header.version),
    format=fields.FORMATS[header.format],
    num_bytes=header.num_bytes,
  )


def fragment_header_from_pb(header: pb.FragmentHeader) -> port.FragmentHeader:
  return port.FragmentHeader(
    fragment=header.fragment,
    version=fields.version_from_pb("FragmentHeader", header, "version"),
    format=fields.format_from_pb(header.format),
    num_bytes=fields.natural("FragmentHeader.num_bytes", header.num_bytes),
  )
