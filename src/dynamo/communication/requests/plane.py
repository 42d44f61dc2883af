"""The interface of the request plane."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from dynamo.communication.backends import load_backend
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.core.context import Context
from dynamo.core.plugins import REQUEST_BACKENDS
from dynamo.core.shared_payload import ReceivedPayload, SharedPayload

Sink = Callable[[bytes], bool]
"""Receives a stream at the caller, called on the loop with each payload.

False means that no more is wanted: the handler is cancelled and `call` returns normally.
"""


class FlowWindow:
    """Flow control of one stream: at most `size_bytes` are sent and not yet released."""

    __slots__ = ("on_release", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.on_release: Callable[[int], None] | None = None

    def release(self, size_bytes: int) -> None:
        """Release `size_bytes` that were consumed, so that the handler may send more."""
        if self.on_release is not None:
            self.on_release(size_bytes)


class ResponseWriter(ABC):
    """The handler's end of one stream.

    A handler may set `is_alive`, which tells whether it still works on this call. The plane calls
    it after long silence. If the answer is False, the call fails with `WorkerFailed`. `shared` is
    the payload that this call shares with others, or None.
    """

    context: Context
    shared: ReceivedPayload | None
    is_alive: Callable[[], bool] | None

    @abstractmethod
    def send(self, payload: bytes | memoryview) -> bool:
        """Queue one payload, a view of bytes that do not change. Never blocks.

        All payloads of one loop iteration leave in one frame per connection. False: the caller is
        gone and the handler is being cancelled.
        """

    @abstractmethod
    async def wait_for_window(self) -> None:
        """Wait until the caller's window has room. Returns at once if there is no window."""


RequestHandler = Callable[[bytes, ResponseWriter], Awaitable[None]]
"""Serves one call. Its return ends the stream.

A `DynamoError` is raised at the caller. Another exception is logged here and becomes an
`InternalError` at the caller. The handler is cancelled when the caller has left.
"""


class Requests(ABC):
    """Serves handlers under this process's address and calls those of other processes."""

    def __init__(self) -> None:
        self._broken_callbacks: list[Callable[[str], None]] = []

    @property
    def connection_error(self) -> str:
        """The reason why the plane's server is unreachable now, or ""."""
        return ""

    @property
    @abstractmethod
    def address(self) -> str:
        """This process's address, for example "tcp://127.0.0.1:4711/INCARNATION".

        Each process has a new incarnation. A call to the address of a process that was replaced
        raises `InstanceGone`.
        """

    @abstractmethod
    async def serve(self, endpoint: str, handler: RequestHandler) -> None:
        """Serve calls for `endpoint`. The first call of this method starts listening."""

    @abstractmethod
    async def withdraw(self, endpoint: str, drain_s: float | None = 0.0) -> None:
        """Refuse new calls. Wait up to `drain_s` (None: no limit) for others, then cancel them."""

    @abstractmethod
    async def call(
        self,
        address: str,
        endpoint: str,
        payload: bytes,
        context: Context,
        sink: Sink,
        *,
        window: FlowWindow | None = None,
        shared: SharedPayload | None = None,
    ) -> None:
        """Call one instance. `sink` gets every payload in order. Returns at the stream's end.

        Raises the handler's error, `NotFound` for an unknown endpoint, `InstanceGone` if the
        instance is not there (no work was done), and `WorkerFailed` if the connection broke midway.
        Cancellation and a False from `sink` cancel the handler. A `window` bounds unconsumed bytes:
        the handler's `wait_for_window` waits until enough of them are released. Calls with the same
        `shared` send its bytes once. Raises `Overloaded` if too many bytes are unsent already.
        """

    def count_calls(self) -> int:
        """Return how many calls this process answers now."""
        return 0

    @abstractmethod
    def count_received_frames(self, address: str) -> int:
        """Return how many frames arrived over the current connection to `address`."""

    def count_sent_bytes(self, address: str) -> tuple[int, int]:
        """Return how many bytes the connection to `address` has sent, and how many are unsent.

        (0, 0) if there is no connection or the backend has no unsent bytes.
        """
        del address
        return 0, 0

    @abstractmethod
    def disconnect(self, address: str) -> None:
        """Abort an unresponsive connection. Its calls raise `WorkerFailed`."""

    async def probe_directly(self, address: str, endpoint: str) -> bool:
        """Return True if the instance answers an empty call without the plane's server.

        An error counts as an answer. False at once if the backend has no direct connection.
        """
        del address, endpoint
        return False

    def bypass(self, address: str) -> None:
        """Reach an instance directly for some seconds. Calls in flight raise `WorkerFailed`."""
        self.disconnect(address)

    def on_connection_broken(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call `callback(address)` if a connection fails. Returns a function that removes it."""
        self._broken_callbacks.append(callback)
        return lambda: self._broken_callbacks.remove(callback)

    def _notify_broken(self, address: str) -> None:
        for callback in tuple(self._broken_callbacks):
            callback(address)

    @abstractmethod
    async def close(self) -> None:
        """Cancel calls and handlers and close every connection."""


async def open_requests(url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Requests:
    """Open a backend by URL. Raises `ConfigError`."""
    plane: Requests = await load_backend(REQUEST_BACKENDS, url).open(url, options)
    return plane
