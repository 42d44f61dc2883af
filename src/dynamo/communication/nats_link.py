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

from dynamo.communication.options import DEFAULT, PlaneOptions
from dynamo.communication.tls import client_context
from dynamo.core.errors import ConfigError
from dynamo.core.tasks import Tasks

log = logging.getLogger(__name__)

SLOWER: Final = 3.0
"""After the quick attempts, a wait is so many times as long."""
PING_S: Final = 0.4
"""Between an answer and the next question."""
SILENT_S: Final = 0.8
"""A server that leaves a question open for so long is away: frozen, or behind a silent network."""
MAX_WAITING_BYTES: Final = 64 << 20
FAREWELL_S: Final = 1.0
KEPT_BYTES: Final = 1 << 30
"""Of one stream, the oldest go first."""
_NOBODY: Final = "503"

_Said = tuple[str, bytes, str] | tuple[str, bool] | tuple[()] | asyncio.Future[None]
"""A message; a subject to listen to, or no longer; nothing: the last word; who waits so far."""

Take = Callable[[str, bytes, str, bool], None]
"""Subject, payload, reply subject; True: nobody listens where our message went."""


class NatsLink:
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
        self._tasks = Tasks()
        self._client: Client | None = None
        self._takes: dict[str, list[Take]] = {}
        self._heard: dict[str, Any] = {}
        self._out: deque[_Said] = deque()
        self._waiting = asyncio.Event()
        self._ended = asyncio.Event()
        self._up = asyncio.Event()
        self._told: list[Callable[[bool], None]] = []
        self._closing = asyncio.Event()
        self._complaint = ""
        self._end = ""
        self._users = 1
        self.waiting_bytes = 0
        self.trouble = "not connected yet"
        self.tried = asyncio.Event()

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT) -> Self:
        """`nats://HOST:PORT[,HOST:PORT]`, with TLS `nats:tls://HOST:PORT`. Dials in the
        background. Raises `ConfigError`."""
        lines = options.lines
        shared = None if lines is None else lines.get(url)
        if isinstance(shared, cls):
            shared._users += 1  # noqa: SLF001 - our own
            return shared
        named = url if url.startswith("nats://") else url.removeprefix("nats:")
        servers = [one.strip() for one in named.split(",") if one.strip()]
        servers = [one if "://" in one else f"nats://{one}" for one in servers]
        if not servers or any(not one.partition("://")[2] for one in servers):
            raise ConfigError(f"{url!r} names no server", hint="nats://HOST:4222")
        context = None
        if options.server_tls or any(one.startswith("tls:") for one in servers):
            context = await asyncio.to_thread(client_context, options.server_tls)
        made = cls(servers, options, context)
        made._tasks.start(made._keep(), "nats link")
        if lines is not None:
            lines[url] = made
        return made

    @property
    def up(self) -> bool:
        """NATS is there."""
        return self._up.is_set()

    @property
    def max_payload_bytes(self) -> int:
        """Of one message, as the server says."""
        return 1 << 20 if self._client is None else int(self._client.max_payload)

    async def wait_up(self) -> None:
        """Return when NATS is there."""
        await self._up.wait()

    def on_state(self, told: Callable[[bool], None]) -> None:
        """`told(up)` whenever NATS came or went."""
        self._told.append(told)

    def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Send, in the order of the calls. With `reply`, that subject hears if nobody listens."""
        if self.up and self.waiting_bytes < MAX_WAITING_BYTES:
            self.waiting_bytes += len(payload)
            self._say((subject, payload, reply))

    def listen(self, subject: str, take: Take) -> Callable[[], None]:
        """Call `take` for every message. Returns the way to stop."""
        takes = self._takes.setdefault(subject, [])
        if not takes:
            self._say((subject, True))
        takes.append(take)

        def leave() -> None:
            if take in takes:
                takes.remove(take)
            if not takes and self._takes.get(subject) is takes:
                del self._takes[subject]
                self._say((subject, False))

        return leave

    async def keep(self, stream: str, subjects: str, age_s: float) -> None:
        """Have JetStream keep what is said at `subjects`. Where it cannot, that is logged."""
        if self._client is None:
            return
        about: dict[str, Any] = {"name": stream, "subjects": [subjects], "max_age": age_s}
        about |= {"max_bytes": KEPT_BYTES, "discard": "old"}
        jetstream = self._client.jetstream()
        try:
            try:
                await jetstream.update_stream(**about)
            except nats.js.errors.NotFoundError:
                await jetstream.add_stream(**about)
        except (nats.errors.Error, TimeoutError) as error:
            fields = {"stream": stream, "error": str(error) or "no answer"}
            log.warning("jetstream keeps nothing", extra={"fields": fields})

    async def settled(self) -> None:
        """Return when NATS has taken all that was said so far; at once while it is away."""
        if self.up:
            done = asyncio.get_running_loop().create_future()
            self._say(done)
            await done

    async def close(self) -> None:
        """Send what waits, then hang up, unless another plane uses the line too."""
        self._users -= 1
        if self._users:
            return
        self._closing.set()
        if self.up and not self._ended.is_set():
            self._out.append(())
            self._waiting.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._ended.wait()
        self._told.clear()
        self._ended.set()
        with suppress(TimeoutError):  # cancelled while it connects, the library leaves things open
            async with asyncio.timeout(FAREWELL_S):
                await self._tasks.join()
        await self._tasks.close()

    def _say(self, what: _Said) -> None:
        if self.up:
            self._out.append(what)
            self._waiting.set()

    async def _keep(self) -> None:
        failures = 0
        for server in itertools.cycle(self._servers):
            if self._closing.is_set():
                return
            try:
                client = await self._connect(server)
            except (OSError, TimeoutError, nats.errors.Error) as error:
                failures += 1
                self._away(
                    f"NATS at {_shown(server)}: {self._complaint or str(error) or 'no answer'}"
                )
                await self._rest(self._pause(failures))
                continue
            failures = 0
            try:
                await self._serve(client, server)
            finally:
                self._gone(f"NATS at {_shown(server)} {self._end}")
                await _hang_up(client)
            await self._rest(self._pause(1) * self._rng.random())

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def _pause(self, failures: int) -> float:
        wait_s = self._options.reconnect_wait_s
        return wait_s if failures <= self._options.max_reconnect else wait_s * SLOWER

    async def _connect(self, server: str) -> Client:
        client = Client()
        self._complaint = ""
        about = self._options

        async def ended() -> None:
            self._ended.set()

        more: dict[str, Any] = {"tls": self._context} if self._context is not None else {}
        if about.user:
            more |= {"user": about.user, "password": about.password}
        try:
            async with asyncio.timeout(about.dial_timeout_s):
                await client.connect(
                    [server],
                    name="dynamo",
                    error_cb=self._error,
                    closed_cb=ended,
                    disconnected_cb=ended,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=max(1, round(about.dial_timeout_s)),
                    **more,
                )
        except BaseException:
            await _hang_up(client)
            raise
        return client

    async def _serve(self, client: Client, server: str) -> None:
        if self._closing.is_set():
            return
        self._ended.clear()
        if not client.is_connected:
            return
        self._client = client
        for subject in list(self._takes):
            await self._subscribe(client, subject)
        log.info("nats answers", extra={"fields": {"server": _shown(server)}})
        self.trouble = ""
        self._up.set()
        self.tried.set()
        self._tell(up=True)
        self._end = "has gone"
        beside = [
            self._tasks.start(self._write(client), "nats writer"),
            self._tasks.start(self._question(client), "nats questions"),
        ]
        try:
            await self._ended.wait()
        finally:
            for task in beside:
                task.cancel()

    async def _question(self, client: Client) -> None:
        """Ask for as long as the server answers. Two waits, since one may end because this process
        was held up, with the answer unread."""
        while True:
            asked = self._tasks.start(_answer(client), "nats question")
            try:
                for _ in range(2):
                    await asyncio.wait({asked}, timeout=SILENT_S / 2)
            finally:
                asked.cancel()
            if not asked.done():
                self._end = "does not answer"
                self._ended.set()
                return
            await asyncio.sleep(PING_S)

    async def _write(self, client: Client) -> None:
        while True:
            while self._out:
                what = self._out.popleft()
                try:
                    await self._do(client, what)
                except (nats.errors.Error, OSError, TimeoutError) as error:
                    log.debug("nats message dropped", extra={"fields": {"error": str(error)}})
            self._waiting.clear()
            await self._waiting.wait()

    async def _do(self, client: Client, what: _Said) -> None:
        if isinstance(what, asyncio.Future):
            try:
                for _ in range(2):  # the library's ping overtakes what it has not written yet
                    await client.flush(round(FAREWELL_S))
            finally:
                _resolve(what)
        elif len(what) == 3:
            subject, payload, reply = what
            self.waiting_bytes -= len(payload)
            await client.publish(subject, payload, reply)
        elif not what:
            await client.flush(round(FAREWELL_S))
            self._ended.set()
        elif what[1]:
            await self._subscribe(client, what[0])
        elif (heard := self._heard.pop(what[0], None)) is not None:
            await heard.unsubscribe()

    async def _subscribe(self, client: Client, subject: str) -> None:
        if subject in self._heard or subject not in self._takes:
            return

        async def hear(message: Msg) -> None:
            headers = message.headers
            nobody = headers is not None and headers.get("Status") == _NOBODY
            for take in tuple(self._takes.get(subject, ())):
                take(message.subject, message.data, message.reply, nobody)

        self._heard[subject] = await client.subscribe(subject, cb=hear)

    def _away(self, trouble: str) -> None:
        if not self.tried.is_set():
            log.warning("nats cannot be reached", extra={"fields": {"error": trouble}})
        self.trouble = trouble
        self.tried.set()

    def _gone(self, trouble: str) -> None:
        self._client = None
        self._heard.clear()
        for what in self._out:
            if isinstance(what, asyncio.Future):
                _resolve(what)
        self._out.clear()
        self.waiting_bytes = 0
        if self._up.is_set():
            self._up.clear()
            if not self._closing.is_set():
                log.warning("nats is away", extra={"fields": {"error": trouble}})
            self.trouble = trouble
            self._tell(up=False)

    async def _error(self, error: Exception) -> None:
        """What the library tells beside: a subscription that drops messages, among others."""
        self._complaint = str(error) or type(error).__name__
        if self.up:
            log.info("nats complains", extra={"fields": {"error": self._complaint}})

    def _tell(self, *, up: bool) -> None:
        for told in tuple(self._told):
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


async def _answer(client: Client) -> None:
    """Return when the server has answered a ping, or the connection is over."""
    with suppress(nats.errors.Error, OSError, TimeoutError):
        await client.flush(round(SILENT_S * 10))


async def _hang_up(client: Client) -> None:
    try:
        async with asyncio.timeout(FAREWELL_S):
            await client.close()
    except (TimeoutError, nats.errors.Error, OSError) as error:
        log.debug("nats not closed in order", extra={"fields": {"error": str(error)}})


def _shown(server: str) -> str:
    """Without user and password."""
    scheme, _, rest = server.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
