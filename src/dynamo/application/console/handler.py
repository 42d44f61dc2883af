"""The routes of the console: its files, the stream of its deployment, logs and settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

import msgspec

from dynamo.application.exchange import Exchange, compress
from dynamo.application.routes import Route
from dynamo.communication.addresses import url_for_browser
from dynamo.core.errors import NotFound

CONSOLE_PATH = "/console"
FILES_PREFIX, LOGS_PREFIX = "/console/", "/logs/"
KEYED = ("processes", "workers")
"""Parts of a deployment that are mappings. Of these, only entries that differ are sent."""
CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'"
)


@cache
def console_files() -> Mapping[str, tuple[str, bytes]]:
    """Return the content type and the body of each file of the console by name."""
    folder = files(__package__).joinpath("static")
    return {
        file.name: (CONTENT_TYPES[kind], file.read_bytes())
        for file in folder.iterdir()
        if (kind := file.name.rpartition(".")[2]) in CONTENT_TYPES
    }


class ConsoleSource(Protocol):
    """The source of the console's data: `services.observing.console.DeploymentConsole`."""

    frontends: Sequence[str]  # as they listen, at the last reading

    async def show_deployment(self) -> Mapping[str, Any]: ...
    async def read_logs(self, process: str) -> Sequence[str]: ...
    async def list_settings(self) -> Any: ...


class ConsoleHandler:
    """Answers /console with a page that holds no data and needs no key, and the routes of data."""

    def __init__(self, source: ConsoleSource) -> None:
        self._source = source
        self.stream = DeploymentStream(source.show_deployment)

    def pages(self) -> Mapping[str, Mapping[str, Route]]:
        """Return the routes of the files, which browsers open without a key."""
        return {CONSOLE_PATH: {"GET": self.page}, FILES_PREFIX: {"GET": self.file}}

    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        """Return the routes of the data."""
        return {
            "/deployment": {"GET": self.deployment},
            LOGS_PREFIX: {"GET": self.logs},
            "/settings": {"GET": self.settings},
        }

    async def page(self, exchange: Exchange) -> None:
        """GET /console: the page, which may call this server and the frontends only."""
        await self._source.show_deployment()  # the frontends are known then
        self._send_file(exchange, "console.html")

    async def file(self, exchange: Exchange) -> None:
        """GET /console/FILE: a script or a style sheet."""
        self._send_file(exchange, exchange.request.path.removeprefix(FILES_PREFIX))

    def _send_file(self, exchange: Exchange, name: str) -> None:
        file = console_files().get(name)
        if file is None:
            raise NotFound(f"the console has no file {name[:100]!r}", hint=f"open {CONSOLE_PATH}")
        content_type, body = file
        encoding, body = compress(exchange.request, body)
        headers = (
            *encoding,
            ("content-type", content_type),
            ("content-security-policy", " ".join((POLICY, *self._frontend_urls(exchange)))),
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
            ("cache-control", "no-cache"),
        )
        exchange.response.send(200, (*headers, *exchange.headers), body)

    def _frontend_urls(self, exchange: Exchange) -> Sequence[str]:
        """Return the frontends that the client of a request reaches."""
        host = exchange.request.header(b"host") or ""
        urls = (url_for_browser(url, host) for url in self._source.frontends)
        return [url for url in dict.fromkeys(urls) if url]

    async def deployment(self, exchange: Exchange) -> None:
        """GET /deployment: a stream of events, first the URLs of the frontends that this client
        reaches, then processes, load, pace, slow requests and alerts, then what changes."""
        await self.stream.serve(exchange, lambda: {"frontends": self._frontend_urls(exchange)})

    async def logs(self, exchange: Exchange) -> None:
        """GET /logs/PROCESS: the last lines that a process has logged."""
        name = exchange.request.path.removeprefix(LOGS_PREFIX)
        exchange.send_value({"process": name, "lines": await self._source.read_logs(name)})

    async def settings(self, exchange: Exchange) -> None:
        """GET /settings: the settings that are no defaults, without secrets."""
        exchange.send_value({"settings": await self._source.list_settings()})


class DeploymentStream:
    """Sends the deployment that `read` returns to all viewers."""

    def __init__(self, read: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._read = read
        self._state: Mapping[str, Any] = {}
        self._whole = b""
        self._viewers: dict[Exchange, asyncio.Event] = {}

    async def serve(self, exchange: Exchange, own: Callable[[], Mapping[str, Any]]) -> None:
        """Send events until the client leaves, or has not read for long (`server.stall_s` or
        `server.stream_backlog_bytes`). `own` returns what only this client gets, of the deployment
        as it was read last."""
        if not self._viewers:
            state = await self._read()
            if not self._viewers:
                self._state, self._whole = state, b""
        self._whole = self._whole or _event(self._state)
        exchange.start_stream("")
        exchange.response.write(_event(own()))
        exchange.response.write(self._whole)
        left = self._viewers[exchange] = asyncio.Event()
        try:
            await left.wait()
        finally:
            self._viewers.pop(exchange, None)

    async def update(self) -> None:
        """Send what has changed, if there are viewers. Called once a second."""
        if not self._viewers:
            return
        state = await self._read()
        event = _event(find_changes(self._state, state))
        self._state, self._whole = state, b""
        for exchange, left in list(self._viewers.items()):
            if not exchange.response.write(event):
                left.set()

    async def close(self) -> None:
        """End all streams, so that the server need not wait for them."""
        for exchange, left in list(self._viewers.items()):
            exchange.response.end()
            left.set()


def find_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parts that differ. Entries of `KEYED` parts that have gone are None."""
    changes: dict[str, Any] = {}
    for name, value in after.items():
        old = before.get(name)
        if name in KEYED and old is not None:
            changed = {key: each for key, each in value.items() if old.get(key) != each}
            if changed := changed | dict.fromkeys(old.keys() - value.keys()):
                changes[name] = changed
        elif old != value:
            changes[name] = value
    return changes


def _event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
