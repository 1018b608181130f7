"""The message types of the manager's service by method name, read from its descriptor."""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvpool.v1 import cache_pb2

_METHODS = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].methods

REQUESTS: dict[str, type[Message]] = {method.name: GetMessageClass(method.input_type) for method in _METHODS}
RESPONSES: dict[str, type[Message]] = {method.name: GetMessageClass(method.output_type) for method in _METHODS}
