"""What a generated stub takes for a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.duplex_call import DuplexCall
from tests.simulation.rpc import UnaryCall
from tests.simulation.stream_call import StreamCall

if TYPE_CHECKING:
    from tests.simulation.bus import Bus
    from tests.simulation.process import Process


class _Method:
    def __init__(self, bus: Bus, process: Process, address: str, kind: type[Any], path: str, options: Any) -> None:
        self._bus, self._process, self._address, self._kind = bus, process, address, kind
        self._name = path.rpartition("/")[2]
        self._serialize = options["request_serializer"]
        self._deserialize = options["response_deserializer"]

    def __call__(self, request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
        """`request`: the message, or an async iterator of the messages."""
        # A connection is there at once or not at all; a caller that would wait for one asks again.
        self._process.on_call(self._name)
        call = self._kind(self._bus, self._process, self._address, self._name, self._serialize, self._deserialize)
        return call.begin(request, timeout)


class Channel:
    """From one process to one address."""

    def __init__(self, bus: Bus, process: Process, address: str) -> None:
        self._bus, self._process, self._address = bus, process, address
        self._methods: dict[str, _Method] = {}

    def unary_unary(self, path: str, **options: Any) -> _Method:
        """Of the generated code."""
        return self._methods.get(path) or self._method(UnaryCall, path, options)

    def unary_stream(self, path: str, **options: Any) -> _Method:
        """Of the generated code."""
        return self._methods.get(path) or self._method(StreamCall, path, options)

    def stream_stream(self, path: str, **options: Any) -> _Method:
        """Of the generated code."""
        return self._methods.get(path) or self._method(DuplexCall, path, options)

    def _method(self, kind: type[Any], path: str, options: Any) -> _Method:
        method = self._methods[path] = _Method(self._bus, self._process, self._address, kind, path, options)
        return method
