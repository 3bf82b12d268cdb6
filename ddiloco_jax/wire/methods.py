"""The methods of the services, read from their descriptors, for both sides.

Only messages are generated; a server's method table and a client's calls come
from here, and with them how each message is turned into bytes.
(arXiv 2604.21428, Sec. 3.)
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf import message as protobuf
from google.protobuf import message_factory

from ddiloco_jax.wire import transfer
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError, abort

SERVICE = pb.DESCRIPTOR.services_by_name["Synchronizer"]
PEER = pb.DESCRIPTOR.services_by_name["Peer"]

_KINDS = {
  (False, False): "unary_unary",
  (False, True): "unary_stream",
  (True, False): "stream_unary",
  (True, True): "stream_stream",
}
_BULK = (pb.PushChunk, pb.FetchChunk, pb.StateChunk)


def make_handlers(
  servicer: Any, service: Any = SERVICE
) -> grpc.GenericRpcHandler:
  """A service, served by the servicer's methods of the same names."""
  handlers = {}
  for method in service.methods:
    if not hasattr(servicer, method.name):
      continue  # gRPC answers UNIMPLEMENTED.
    make = getattr(grpc, f"{_kind(method)}_rpc_method_handler")
    checked = _checked_stream if method.client_streaming else _checked
    handlers[method.name] = make(
      functools.partial(checked, getattr(servicer, method.name)),
      request_deserializer=_lenient(_parser(method.input_type)),
      response_serializer=_serializer(method.output_type),
    )
  return grpc.method_handlers_generic_handler(service.full_name, handlers)


def make_call(
  channel: grpc.Channel,
  name: str,
  service: Any = SERVICE,
  metadata: tuple[tuple[str, str], ...] = (),
) -> Callable[..., Any]:
  """One method, as a client calls it on a channel; metadata goes along."""
  method = service.methods_by_name[name]
  call = getattr(channel, _kind(method))(
    f"/{service.full_name}/{name}",
    request_serializer=_serializer(method.input_type),
    response_deserializer=_parser(method.output_type),
  )
  return functools.partial(call, metadata=metadata)


class _Malformed:
  """Stands for bytes that are no message."""


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
  """gRPC itself would call a parser's error its own, INTERNAL."""

  def parse_or_mark(data: bytes) -> Any:
    try:
      return parse(data)
    except protobuf.DecodeError:
      return _Malformed()

  return parse_or_mark


def _checked(method: Callable, request: Any, context: Any) -> Any:
  if isinstance(request, _Malformed):
    abort(context, _malformed())
  return method(request, context)


def _checked_stream(method: Callable, requests: Iterator, context: Any) -> Any:
  return method(_well_formed(requests), context)


def _well_formed(requests: Iterator) -> Iterator:
  for request in requests:
    if isinstance(request, _Malformed):
      raise _malformed()
    yield request


def _malformed() -> ServiceError:
  return ServiceError(
    "INVALID_ARGUMENT",
    "a message cannot be parsed: send those of synchronizer.proto,"
    " uncompressed.",
  )


def _kind(method: Any) -> str:
  return _KINDS[method.client_streaming, method.server_streaming]


def _parser(descriptor: Any) -> Callable[[bytes], Any]:
  message = message_factory.GetMessageClass(descriptor)
  return transfer.parser(message) if message in _BULK else message.FromString


def _serializer(descriptor: Any) -> Callable[[Any], bytes]:
  message = message_factory.GetMessageClass(descriptor)
  return transfer.serialize if message in _BULK else message.SerializeToString
