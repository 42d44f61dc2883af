"""The routes of the console: its files, and what it shows beside the observer's other routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from dynamo.application.console.stream import DeploymentStream
from dynamo.application.exchange import Exchange, compress
from dynamo.application.routes import Route
from dynamo.communication.addresses import url_for_browser
from dynamo.core.errors import NotFound

CONSOLE_PATH = "/console"
FILES_PREFIX, LOGS_PREFIX = "/console/", "/logs/"
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

    @property
    def frontends(self) -> Sequence[str]: ...
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
        await self.stream.serve(exchange, {"frontends": self._frontend_urls(exchange)})

    async def logs(self, exchange: Exchange) -> None:
        """GET /logs/PROCESS: the last lines that a process has logged."""
        name = exchange.request.path.removeprefix(LOGS_PREFIX)
        exchange.send_value({"process": name, "lines": await self._source.read_logs(name)})

    async def settings(self, exchange: Exchange) -> None:
        """GET /settings: the settings that are no defaults, without secrets."""
        exchange.send_value({"settings": await self._source.list_settings()})
