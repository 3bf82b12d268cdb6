"""Faults that cross the wire: one error, one table to gRPC codes, both ways.

What the protocol foresees (late, duplicate, carried, refused ...) is never an
error but an outcome. (arXiv 2604.21428, Sec. 3.)
"""

from typing import NoReturn

import grpc

# A code's name is gRPC's own; what it means here, and for whom to act.
CODES = {
  "UNAUTHENTICATED": "no session secret or a wrong one, token or certificate",
  "PERMISSION_DENIED": "a learner's token on an admin call",
  "FAILED_PRECONDITION": "layout, run id or protocol differ, or run finished",
  "ABORTED": "an older incarnation or epoch speaks",
  "INVALID_ARGUMENT": "malformed header, wrong length or checksum, bad counts",
  "RESOURCE_EXHAUSTED": "too many learners, or a full queue",
  "UNAVAILABLE": "not reached, shutting down or restoring: retry",
  "INTERNAL": "a fault of the syncer's own: see its log",
}
# Of an error's text: it goes in a header, percent-encoded, and a client takes
# 8 KiB of headers.
_MAX_BYTES = 2048
_PUSHBACK = "grpc-retry-pushback-ms"  # gRPC's own name for it.
_TO_GRPC = {name: grpc.StatusCode[name] for name in CODES}
_FROM_GRPC = {code: name for name, code in _TO_GRPC.items()} | {
  grpc.StatusCode.CANCELLED: "UNAVAILABLE",
  grpc.StatusCode.DEADLINE_EXCEEDED: "UNAVAILABLE",
  grpc.StatusCode.UNKNOWN: "INTERNAL",
  grpc.StatusCode.DATA_LOSS: "UNAVAILABLE",
  # The address answers gRPC, but serves no ddiloco.v1.Synchronizer.
  grpc.StatusCode.UNIMPLEMENTED: "FAILED_PRECONDITION",
}


class ServiceError(Exception):
  """A fault of a caller or of the transport.

  Attributes:
    code: A name in `CODES`.
    text: What was wrong: the value, the rule, the fix.
    retry_after_s: When the same call may succeed, where only time is wanted.
  """

  def __init__(self, code: str, text: str, retry_after_s: float | None = None):
    assert code in CODES, code
    super().__init__(f"{code}: {text}")
    self.code = code
    self.text = text
    self.retry_after_s = retry_after_s

  @property
  def is_worth_retrying(self) -> bool:
    """True where the same call may succeed later."""
    return self.code == "UNAVAILABLE" or self.retry_after_s is not None

  @property
  def is_of_session(self) -> bool:
    """True where the session is not current: its control stream knows more."""
    return self.code in ("UNAUTHENTICATED", "ABORTED")


def to_grpc(code: str) -> grpc.StatusCode:
  """The gRPC code of an error's code."""
  return _TO_GRPC[code]


def abort(context: grpc.ServicerContext, error: ServiceError) -> NoReturn:
  """Ends a call with an error; a text that no client would take is cut."""
  if error.retry_after_s is not None:
    context.set_trailing_metadata(
      ((_PUSHBACK, str(round(1000 * error.retry_after_s))),)
    )
  text = error.text.encode(errors="replace")[:_MAX_BYTES].decode(
    errors="ignore"
  )
  context.abort(_TO_GRPC[error.code], text)


def from_grpc(error: grpc.RpcError, address: str) -> ServiceError:
  """What a call to `address` failed with."""
  assert isinstance(error, grpc.Call), error
  code = error.code()
  text = error.details() or "no details"
  name = _FROM_GRPC.get(code, "INTERNAL")
  if name != code.name or name in ("UNAVAILABLE", "INTERNAL"):
    text = f"{text} ({code.name} from {address})"
  return ServiceError(name, text, _retry_after_s(error))


def _retry_after_s(error: grpc.Call) -> float | None:
  for key, value in error.trailing_metadata() or ():
    if key == _PUSHBACK and isinstance(value, str) and value.isdecimal():
      return int(value) / 1000
  return None
