"""The promise of the request plane, and the table of its backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from dynamo.communication.backends import load_backend
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.core.context import Context
from dynamo.core.plugins import REQUEST_BACKENDS

Sink = Callable[[bytes], bool]
"""The caller's end of a stream: called on the loop with each payload; False = enough, which cancels
the handler and lets `call` return normally."""

CallInfo = Context
"""What the caller sent along: request id, attempt, time left, trace."""


class FlowWindow:
    """A caller's credit for one stream: at most `size_bytes` sent and not yet released."""

    __slots__ = ("on_release", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.on_release: Callable[[int], None] | None = None

    def release(self, size_bytes: int) -> None:
        """The consumer took `size_bytes`; the plane tells the handler's end."""
        if self.on_release is not None:
            self.on_release(size_bytes)


class ResponseWriter(ABC):
    """The handler's end of one stream. `alive`, where a handler sets it: whether it still works on
    this call; asked after long silence. One that is not ends with `WorkerFailed`."""

    context: Context
    is_alive: Callable[[], bool] | None

    @abstractmethod
    def send(self, payload: bytes) -> bool:
        """Queue one payload; written with everything else of this turn of the loop in one frame
        per connection. Never blocks. False: the caller is gone (the handler is being cancelled)."""

    @abstractmethod
    async def wait_for_window(self) -> None:
        """Wait until the caller's window (bytes) is open again; at once where there is none."""


RequestHandler = Callable[[bytes, ResponseWriter], Awaitable[None]]
"""Serves one call. Returning ends the stream; a DynamoError raised is raised at the caller; another
exception becomes `InternalError` there and is logged here; being cancelled: the caller has left."""


class Requests(ABC):
    """Both ends of the request plane: serves handlers under one address, calls other addresses."""

    @property
    def connection_error(self) -> str:
        """Why the plane's server cannot be reached now; "" when all is well."""
        return ""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where others reach this process, e.g. "tcp://127.0.0.1:4711/INCARNATION".
        The incarnation is new for every process: a call to an address whose process was replaced
        raises `InstanceGone`."""

    @abstractmethod
    async def serve(self, endpoint: str, handler: RequestHandler) -> None:
        """Answer calls for `endpoint` from now on (listening starts with the first)."""

    @abstractmethod
    async def withdraw(self, endpoint: str, drain_s: float | None = 0.0) -> None:
        """Refuse new calls; wait up to `drain_s` (None: without end) for those in flight, then
        cancel them."""

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
    ) -> None:
        """Call one instance; `sink` gets every payload in order. Returns at the stream's end.

        Raises what the handler raised; `NotFound` for an unknown endpoint; `InstanceGone` where the
        instance is not there (nothing was done); `WorkerFailed` when the connection broke midway.
        Being cancelled, or `sink` answering False, cancels the handler. A `window` bounds what is
        under way: the handler's `credit` waits until the consumer released enough of it.
        """

    @abstractmethod
    def count_received_frames(self, address: str) -> int:
        """How many frames have come from `address` over the present connection: it grows while
        somebody there speaks."""

    @abstractmethod
    def disconnect(self, address: str) -> None:
        """Nobody at `address` answers: give up the connection, so that calls over it raise
        `WorkerFailed` and later ones connect anew."""

    async def probe_directly(self, address: str, endpoint: str) -> bool:
        """Whether the instance answers a call of nothing, with an error too, on a way that leaves
        out the plane's server. False at once where there is no such way."""
        del address, endpoint
        return False

    def bypass(self, address: str) -> None:
        """The instance answers only beside the plane's server: calls under way raise
        `WorkerFailed`, those of the next seconds go the other way."""
        self.disconnect(address)

    @abstractmethod
    def on_connection_broken(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """`callback(address)` when the connection to an address breaks or cannot be made. Returns
        the way to stop that."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel calls and handlers, close every connection."""


async def open_requests(url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Requests:
    """Open a backend by URL. `tcp://HOST:PORT` with port 0 = any. Raises `ConfigError`."""
    plane: Requests = await load_backend(REQUEST_BACKENDS, url).open(url, options)
    return plane
