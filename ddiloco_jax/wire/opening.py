"""How calls open: none holds a thread of a server before its first message.

gRPC reads a request on a thread of the server's pool, and waits there for as
long as its caller likes. Here every call opens as a stream whose first message
has a time limit; where many are silent at once, the oldest are ended, so that
whoever speaks at once is served. (docs/security.md)
"""

import collections
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NoReturn

import grpc
from google.protobuf import message as protobuf

from ddiloco_jax.wire.status import ServiceError, abort

_MAX_GUEST_BYTES = 1024  # A request of health or reflection: names.


class Newest:
  """Things of which a number may be open: a further one ends the oldest.

  Args:
    limit: In all.
  """

  def __init__(self, limit: int):
    self._limit = limit
    self._lock = threading.Lock()
    self._open: collections.OrderedDict[object, Callable[[], object]] = (
      collections.OrderedDict()
    )

  def enter(self, key: object, end: Callable[[], object]) -> None:
    """Opens one, which `end` would end."""
    with self._lock:
      self._open[key] = end
      oldest = len(self._open) > self._limit and self._open.popitem(last=False)
    if oldest:
      oldest[1]()

  def leave(self, key: object) -> None:
    """It has ended, or is counted no more."""
    with self._lock:
      self._open.pop(key, None)


class Opening(grpc.ServerInterceptor):
  """Waits for the first message of every call that is let through.

  Args:
    timeout_s: For so long.
    max_silent: Calls that may wait for it at once.
    package: Of the services that keep their own limits; the streams of others,
      such as reflection, are guests.
    max_guests: Streams of guests that may be open at once.
  """

  def __init__(
    self, timeout_s: float, max_silent: int, package: str, max_guests: int = 0
  ):
    self._timeout_s = timeout_s
    self._silent = Newest(max_silent)
    self._prefix = f"/{package}."
    self._guests = Newest(max(1, max_guests))

  def intercept_service(self, continuation: Any, handler_call_details: Any):
    """The same method, behind the first message."""
    handler = continuation(handler_call_details)
    if handler is None:
      return None
    is_guest = not handler_call_details.method.startswith(self._prefix)
    kind = "stream" if handler.response_streaming else "unary"
    make = getattr(grpc, f"stream_{kind}_rpc_method_handler")
    return make(
      self._behind(handler, is_guest=is_guest),
      request_deserializer=_lenient(handler.request_deserializer),
      response_serializer=handler.response_serializer,
    )

  def _behind(self, handler: Any, *, is_guest: bool) -> Callable[..., Any]:
    method = (
      handler.unary_unary
      or handler.unary_stream
      or handler.stream_unary
      or handler.stream_stream
    )

    def serve(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
      try:
        first = self._first(requests)
        if is_guest:
          _check_size(first)
          if handler.response_streaming:
            self._admit(context)
        if not handler.request_streaming:
          return method(_only(first), context)
      except ServiceError as error:
        abort(context, error)
      # A library's method knows nothing of our errors.
      fail = functools.partial(abort, context) if is_guest else _raise
      stream = _well_formed(itertools.chain(first, requests), fail)
      return method(stream, context)

    return serve

  def _first(self, requests: Iterator[Any]) -> list[Any]:
    """The first message; none, if the caller has no more to say."""
    first: futures.Future[list[Any]] = futures.Future()

    def take() -> None:
      try:
        found = list(itertools.islice(requests, 1))
      except BaseException as error:
        _settle(first, error)
      else:
        _settle(first, found)

    self._silent.enter(first, lambda: _settle(first, self._too_late()))
    try:
      threading.Thread(target=take, name="first-message", daemon=True).start()
      return first.result(self._timeout_s)
    except TimeoutError:
      raise self._too_late() from None
    finally:
      self._silent.leave(first)

  def _too_late(self) -> ServiceError:
    return ServiceError(
      "UNAVAILABLE",
      "a call was opened, and its first message did not come within"
      f" {self._timeout_s:g} s, or before many later calls. Open another one,"
      " and send it at once.",
    )

  def _admit(self, context: grpc.ServicerContext) -> None:
    self._guests.enter(context, context.cancel)
    if not context.add_callback(lambda: self._guests.leave(context)):
      self._guests.leave(context)  # It went away in between.


def _check_size(first: list[Any]) -> None:
  if any(getattr(x, "ByteSize", int)() > _MAX_GUEST_BYTES for x in first):
    raise ServiceError(
      "INVALID_ARGUMENT",
      f"the request has more than {_MAX_GUEST_BYTES} bytes: send a name.",
    )


class _Malformed:
  """Stands for bytes that are no message."""


def _lenient(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
  """gRPC itself would call a parser's error its own, INTERNAL."""

  def parse_or_mark(data: bytes) -> Any:
    try:
      return parse(data) if parse else data
    except protobuf.DecodeError:
      return _Malformed()

  return parse_or_mark


def _well_formed(
  requests: Iterator[Any], fail: Callable[[ServiceError], NoReturn]
) -> Iterator[Any]:
  for request in requests:
    if isinstance(request, _Malformed):
      fail(
        ServiceError(
          "INVALID_ARGUMENT",
          "a message cannot be parsed: send those of the service's .proto"
          " file, uncompressed.",
        )
      )
    yield request


def _raise(error: ServiceError) -> NoReturn:
  raise error


def _only(first: list[Any]) -> Any:
  for request in _well_formed(iter(first), _raise):
    return request
  raise ServiceError(
    "INVALID_ARGUMENT", "the call has no message: send the method's request."
  )


def _settle(first: futures.Future, found: list[Any] | BaseException) -> None:
  """Sets what was found, if nothing is yet."""
  try:
    if isinstance(found, BaseException):
      first.set_exception(found)
    else:
      first.set_result(found)
  except futures.InvalidStateError:
    pass  # It was given up.
