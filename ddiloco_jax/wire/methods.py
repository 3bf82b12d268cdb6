"""The methods of the services, read from their descriptors, for both sides.

Only messages are generated; a server's method table and a client's calls come
from here, and with them how each message is turned into bytes.
(arXiv 2604.21428, Sec. 3.)
"""

import functools
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import message_factory

from ddiloco_jax.wire import transfer
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb

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
  """A service, served by the servicer's methods of the same names.

  A server has an `opening.Opening` before them.
  """
  handlers = {}
  for method in service.methods:
    if not hasattr(servicer, method.name):
      continue  # gRPC answers UNIMPLEMENTED.
    make = getattr(grpc, f"{_kind(method)}_rpc_method_handler")
    handlers[method.name] = make(
      getattr(servicer, method.name),
      request_deserializer=_parser(method.input_type),
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


def _kind(method: Any) -> str:
  return _KINDS[method.client_streaming, method.server_streaming]


def _parser(descriptor: Any) -> Callable[[bytes], Any]:
  message = message_factory.GetMessageClass(descriptor)
  return transfer.parser(message) if message in _BULK else message.FromString


def _serializer(descriptor: Any) -> Callable[[Any], bytes]:
  message = message_factory.GetMessageClass(descriptor)
  return transfer.serialize if message in _BULK else message.SerializeToString
