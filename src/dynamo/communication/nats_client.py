"""The line to NATS, dialled for as long as it takes; the one home of its library."""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final, Self

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.tls import client_tls_context
from dynamo.core.errors import ConfigError
from dynamo.core.tasks import BackgroundTasks

log = logging.getLogger(__name__)

SLOW_RETRY_FACTOR: Final = 3.0
"""After the quick attempts, a wait is so many times as long."""
PING_INTERVAL_S: Final = 0.4
"""Between an answer and the next question."""
PING_TIMEOUT_S: Final = 0.8
"""A server that leaves a question open for so long is away: frozen, or behind a silent network."""
MAX_PENDING_BYTES: Final = 64 << 20
CLOSE_TIMEOUT_S: Final = 1.0
MAX_STREAM_BYTES: Final = 1 << 30
"""Of one stream, the oldest go first."""
_NO_RESPONDERS: Final = "503"

_Operation = tuple[str, bytes, str] | tuple[str, bool] | tuple[()] | asyncio.Future[None]
"""A message; a subject to listen to, or no longer; nothing: the last word; who waits so far."""

NatsMessageHandler = Callable[[str, bytes, str, bool], None]
"""Subject, payload, reply subject; True: nobody listens where our message went."""


class NatsClient:
    """`publish` and `listen` return at once; what is said while NATS is away is dropped, what is
    listened to is listened to again when it is back. `trouble`: why there is no connection now.
    Planes that were opened with the same `options.lines` share one link a URL; the last closes it.
    """

    def __init__(
        self, servers: Sequence[str], options: PlaneOptions, context: ssl.SSLContext | None
    ) -> None:
        self._servers = servers
        self._options = options
        self._context = context
        self._rng = Random()
        self._tasks = BackgroundTasks()
        self._client: Client | None = None
        self._handlers: dict[str, list[NatsMessageHandler]] = {}
        self._subscriptions: dict[str, Any] = {}
        self._outgoing: deque[_Operation] = deque()
        self._outgoing_ready = asyncio.Event()
        self._disconnected = asyncio.Event()
        self._connected = asyncio.Event()
        self._state_callbacks: list[Callable[[bool], None]] = []
        self._closing = asyncio.Event()
        self._last_error = ""
        self._disconnect_reason = ""
        self._references = 1
        self.pending_bytes = 0
        self.connection_error = "not connected yet"
        self.first_attempt_done = asyncio.Event()

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """`nats://HOST:PORT[,HOST:PORT]`, with TLS `nats:tls://HOST:PORT`. Dials in the
        background. Raises `ConfigError`."""
        lines = options.shared_clients
        shared = None if lines is None else lines.get(url)
        if isinstance(shared, cls):
            shared._references += 1  # noqa: SLF001 - our own
            return shared
        named = url if url.startswith("nats://") else url.removeprefix("nats:")
        servers = [one.strip() for one in named.split(",") if one.strip()]
        servers = [one if "://" in one else f"nats://{one}" for one in servers]
        if not servers or any(not one.partition("://")[2] for one in servers):
            raise ConfigError(f"{url!r} names no server", hint="nats://HOST:4222")
        context = None
        if options.server_tls or any(one.startswith("tls:") for one in servers):
            context = await asyncio.to_thread(client_tls_context, options.server_tls)
        made = cls(servers, options, context)
        made._tasks.start(made._run(), "nats link")
        if lines is not None:
            lines[url] = made
        return made

    @property
    def connected(self) -> bool:
        """NATS is there."""
        return self._connected.is_set()

    @property
    def max_payload_bytes(self) -> int:
        """Of one message, as the server says."""
        return 1 << 20 if self._client is None else int(self._client.max_payload)

    async def wait_connected(self) -> None:
        """Return when NATS is there."""
        await self._connected.wait()

    def on_connection_change(self, told: Callable[[bool], None]) -> None:
        """`told(up)` whenever NATS came or went."""
        self._state_callbacks.append(told)

    def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Send, in the order of the calls. With `reply`, that subject hears if nobody listens."""
        if self.connected and self.pending_bytes < MAX_PENDING_BYTES:
            self.pending_bytes += len(payload)
            self._enqueue((subject, payload, reply))

    def subscribe(self, subject: str, take: NatsMessageHandler) -> Callable[[], None]:
        """Call `take` for every message. Returns the way to stop."""
        takes = self._handlers.setdefault(subject, [])
        if not takes:
            self._enqueue((subject, True))
        takes.append(take)

        def leave() -> None:
            if take in takes:
                takes.remove(take)
            if not takes and self._handlers.get(subject) is takes:
                del self._handlers[subject]
                self._enqueue((subject, False))

        return leave

    async def ensure_stream(self, stream: str, subjects: str, age_s: float) -> None:
        """Have JetStream keep what is said at `subjects`. Where it cannot, that is logged."""
        if self._client is None:
            return
        about: dict[str, Any] = {"name": stream, "subjects": [subjects], "max_age": age_s}
        about |= {"max_bytes": MAX_STREAM_BYTES, "discard": "old"}
        jetstream = self._client.jetstream()
        try:
            try:
                await jetstream.update_stream(**about)
            except nats.js.errors.NotFoundError:
                await jetstream.add_stream(**about)
        except (nats.errors.Error, TimeoutError) as error:
            fields = {"stream": stream, "error": str(error) or "no answer"}
            log.warning("jetstream keeps nothing", extra={"fields": fields})

    async def flush(self) -> None:
        """Return when NATS has taken all that was said so far; at once while it is away."""
        if self.connected:
            done = asyncio.get_running_loop().create_future()
            self._enqueue(done)
            await done

    async def close(self) -> None:
        """Send what waits, then hang up, unless another plane uses the line too."""
        self._references -= 1
        if self._references:
            return
        self._closing.set()
        if self.connected and not self._disconnected.is_set():
            self._outgoing.append(())
            self._outgoing_ready.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._disconnected.wait()
        self._state_callbacks.clear()
        self._disconnected.set()
        with suppress(TimeoutError):  # cancelled while it connects, the library leaves things open
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._tasks.join()
        await self._tasks.close()

    def _enqueue(self, what: _Operation) -> None:
        if self.connected:
            self._outgoing.append(what)
            self._outgoing_ready.set()

    async def _run(self) -> None:
        failures = 0
        for server in itertools.cycle(self._servers):
            if self._closing.is_set():
                return
            try:
                client = await self._connect(server)
            except (OSError, TimeoutError, nats.errors.Error) as error:
                failures += 1
                self._on_connect_failed(
                    f"NATS at {_without_credentials(server)}: {self._last_error or str(error) or 'no answer'}"
                )
                await self._sleep_unless_closing(self._retry_delay_s(failures))
                continue
            failures = 0
            try:
                await self._run_connection(client, server)
            finally:
                self._on_disconnected(
                    f"NATS at {_without_credentials(server)} {self._disconnect_reason}"
                )
                await _close_client(client)
            await self._sleep_unless_closing(self._retry_delay_s(1) * self._rng.random())

    async def _sleep_unless_closing(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def _retry_delay_s(self, failures: int) -> float:
        wait_s = self._options.reconnect_wait_s
        return wait_s if failures <= self._options.max_reconnect else wait_s * SLOW_RETRY_FACTOR

    async def _connect(self, server: str) -> Client:
        client = Client()
        self._last_error = ""
        about = self._options

        async def ended() -> None:
            self._disconnected.set()

        more: dict[str, Any] = {"tls": self._context} if self._context is not None else {}
        if about.user:
            more |= {"user": about.user, "password": about.password}
        try:
            async with asyncio.timeout(about.dial_timeout_s):
                await client.connect(
                    [server],
                    name="dynamo",
                    error_cb=self._on_library_error,
                    closed_cb=ended,
                    disconnected_cb=ended,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=max(1, round(about.dial_timeout_s)),
                    **more,
                )
        except BaseException:
            await _close_client(client)
            raise
        return client

    async def _run_connection(self, client: Client, server: str) -> None:
        if self._closing.is_set():
            return
        self._disconnected.clear()
        if not client.is_connected:
            return
        self._client = client
        for subject in list(self._handlers):
            await self._subscribe_on_server(client, subject)
        log.info("nats answers", extra={"fields": {"server": _without_credentials(server)}})
        self.connection_error = ""
        self._connected.set()
        self.first_attempt_done.set()
        self._notify_state(up=True)
        self._disconnect_reason = "has gone"
        beside = [
            self._tasks.start(self._write_loop(client), "nats writer"),
            self._tasks.start(self._ping_loop(client), "nats questions"),
        ]
        try:
            await self._disconnected.wait()
        finally:
            for task in beside:
                task.cancel()

    async def _ping_loop(self, client: Client) -> None:
        """Ask for as long as the server answers. Two waits, since one may end because this process
        was held up, with the answer unread."""
        while True:
            asked = self._tasks.start(_ping(client), "nats question")
            try:
                for _ in range(2):
                    await asyncio.wait({asked}, timeout=PING_TIMEOUT_S / 2)
            finally:
                asked.cancel()
            if not asked.done():
                self._disconnect_reason = "does not answer"
                self._disconnected.set()
                return
            await asyncio.sleep(PING_INTERVAL_S)

    async def _write_loop(self, client: Client) -> None:
        while True:
            while self._outgoing:
                what = self._outgoing.popleft()
                try:
                    await self._execute(client, what)
                except (nats.errors.Error, OSError, TimeoutError) as error:
                    log.debug("nats message dropped", extra={"fields": {"error": str(error)}})
            self._outgoing_ready.clear()
            await self._outgoing_ready.wait()

    async def _execute(self, client: Client, what: _Operation) -> None:
        if isinstance(what, asyncio.Future):
            try:
                for _ in range(2):  # the library's ping overtakes what it has not written yet
                    await client.flush(round(CLOSE_TIMEOUT_S))
            finally:
                _resolve(what)
        elif len(what) == 3:
            subject, payload, reply = what
            self.pending_bytes -= len(payload)
            await client.publish(subject, payload, reply)
        elif not what:
            await client.flush(round(CLOSE_TIMEOUT_S))
            self._disconnected.set()
        elif what[1]:
            await self._subscribe_on_server(client, what[0])
        elif (heard := self._subscriptions.pop(what[0], None)) is not None:
            await heard.unsubscribe()

    async def _subscribe_on_server(self, client: Client, subject: str) -> None:
        if subject in self._subscriptions or subject not in self._handlers:
            return

        async def hear(message: Msg) -> None:
            headers = message.headers
            nobody = headers is not None and headers.get("Status") == _NO_RESPONDERS
            for take in tuple(self._handlers.get(subject, ())):
                take(message.subject, message.data, message.reply, nobody)

        self._subscriptions[subject] = await client.subscribe(subject, cb=hear)

    def _on_connect_failed(self, trouble: str) -> None:
        if not self.first_attempt_done.is_set():
            log.warning("nats cannot be reached", extra={"fields": {"error": trouble}})
        self.connection_error = trouble
        self.first_attempt_done.set()

    def _on_disconnected(self, trouble: str) -> None:
        self._client = None
        self._subscriptions.clear()
        for what in self._outgoing:
            if isinstance(what, asyncio.Future):
                _resolve(what)
        self._outgoing.clear()
        self.pending_bytes = 0
        if self._connected.is_set():
            self._connected.clear()
            if not self._closing.is_set():
                log.warning("nats is away", extra={"fields": {"error": trouble}})
            self.connection_error = trouble
            self._notify_state(up=False)

    async def _on_library_error(self, error: Exception) -> None:
        """What the library tells beside: a subscription that drops messages, among others."""
        self._last_error = str(error) or type(error).__name__
        if self.connected:
            log.info("nats complains", extra={"fields": {"error": self._last_error}})

    def _notify_state(self, *, up: bool) -> None:
        for told in tuple(self._state_callbacks):
            told(up)


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def subject_token(text: str) -> str:
    """`text` as one token of a subject: what NATS does not take is %XX."""
    plain = "".join(
        one if one.isascii() and (one.isalnum() or one in "-_") else f"%{ord(one):02X}"
        for one in text
    )
    return plain or "%"


async def _ping(client: Client) -> None:
    """Return when the server has answered a ping, or the connection is over."""
    with suppress(nats.errors.Error, OSError, TimeoutError):
        await client.flush(round(PING_TIMEOUT_S * 10))


async def _close_client(client: Client) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await client.close()
    except (TimeoutError, nats.errors.Error, OSError) as error:
        log.debug("nats not closed in order", extra={"fields": {"error": str(error)}})


def _without_credentials(server: str) -> str:
    """Without user and password."""
    scheme, _, rest = server.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
