"""What is refused at the edge, before the machine hears of it.

Every error names the value, the rule and the fix. (spec: wire, rule 10.)
"""

from ddiloco_jax.wire import codec, port
from ddiloco_jax.wire.status import ServiceError


def check_hello(hello: port.Hello, spec: port.RunSpec) -> None:
  """Raises FAILED_PRECONDITION for another protocol, run or layout."""
  expected = {
    "protocol version": (hello.protocol_version, port.PROTOCOL_VERSION),
    "run id": (hello.run_id or spec.run_id, spec.run_id),
    "layout digest": (hello.layout_digest, spec.layout.digest()),
  }
  for name, (theirs, ours) in expected.items():
    if theirs != ours:
      raise ServiceError(
        "FAILED_PRECONDITION",
        f"the {name} of learner {hello.learner!r} is {theirs!r}, this run's is"
        f" {ours!r}: they must be equal. Ask GetRun for this run's settings"
        " and layout, and compute the digest from it.",
      )


def check_fragment(fragment: int, spec: port.RunSpec) -> None:
  """Raises INVALID_ARGUMENT for a fragment that does not exist."""
  num_fragments = spec.layout.num_fragments
  if not 0 <= fragment < num_fragments:
    raise ServiceError(
      "INVALID_ARGUMENT",
      f"fragment {fragment} does not exist: this run has {num_fragments},"
      " numbered from 0.",
    )


def check_reply(header: port.ReplyHeader, spec: port.RunSpec) -> None:
  """Raises INVALID_ARGUMENT for a header that the layout does not imply."""
  check_fragment(header.fragment, spec)
  if header.format != spec.up_format:
    raise ServiceError(
      "INVALID_ARGUMENT",
      f"format {header.format!r}: replies of this run are in"
      f" {spec.up_format!r} (up_format of GetRun).",
    )
  leaves = spec.layout.fragment(header.fragment)
  num_bytes = codec.num_bytes(leaves, header.format)
  if header.num_bytes != num_bytes:
    raise ServiceError(
      "INVALID_ARGUMENT",
      f"num_bytes {header.num_bytes}: fragment {header.fragment} in"
      f" {header.format} has {num_bytes}, by the layout of GetRun.",
    )
