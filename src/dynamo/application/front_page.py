"""The routes of web browsers: a page at / that shows what is served, and an icon."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files

import msgspec

from dynamo.application.console.handler import CONSOLE_PATH
from dynamo.application.exchange import Exchange
from dynamo.application.foreign_paths import ROOT, not_found_error
from dynamo.application.http_errors import Headers
from dynamo.application.routes import Route, RouteTable
from dynamo.communication.addresses import url_for_browser
from dynamo.core.errors import DynamoError

HTML_CONTENT_TYPE = "text/html; charset=utf-8"
DATA_PLACEHOLDER = b"{{data}}"
LocateConsole = Callable[[], Awaitable[str]]
ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    b'<rect width="16" height="16" rx="4" fill="#2a6fdb"/>'
    b'<path d="M5 3h3a5 5 0 0 1 0 10H5z" fill="none" stroke="#fff" stroke-width="2"/></svg>'
)
ICON_HEADERS: Headers = (
    ("content-type", "image/svg+xml"),
    ("cache-control", "max-age=86400"),
)


class FrontPage:
    """Answers / with a page to browsers and with a 404 that names the routes to other clients.

    `table` has the routes of the argument `table`, too. The page itself holds their paths and no
    data: its script asks the JSON routes, with
    the user's key if `needs_key`. A process with `page_path` redirects browsers there instead, and
    one with `locate_console` to the console, unless there is no observer that they reach.
    """

    def __init__(
        self,
        table: Mapping[str, Mapping[str, Route]],
        *,
        needs_key: bool = False,
        page_path: str = "",
        locate_console: LocateConsole | None = None,
    ) -> None:
        self._page_path, self._locate_console = page_path, locate_console
        self._known = [path for path in table if path[-1] != "/"]
        routes = {path: list(methods) for path, methods in table.items()}
        self._data = msgspec.json.encode({"needs_key": needs_key, "routes": routes})

        pages: dict[str, dict[str, Route]] = {
            "/": {"GET": self.show, "POST": self.show},
            "/favicon.ico": {"GET": self.icon},
        }
        self.table = RouteTable({**table, **pages})

    async def show(self, exchange: Exchange) -> None:
        """GET /: the page, if the client accepts HTML."""
        request = exchange.request
        if request.method == "POST" or "text/html" not in (request.header(b"accept") or ""):
            raise not_found_error(request.method, ROOT, self._known)
        if location := self._page_path or await self._find_console(exchange):
            headers = (("location", location), *exchange.headers)
            exchange.response.send(303, headers, b"")
            return
        page = files(__package__).joinpath("front_page.html").read_bytes()
        body = page.replace(DATA_PLACEHOLDER, self._data)
        exchange.send(HTML_CONTENT_TYPE, body)

    async def _find_console(self, exchange: Exchange) -> str:
        """Return the URL of the console, or "" if the client cannot reach one or asks for the page
        itself by /?page."""
        request = exchange.request
        if self._locate_console is None or request.query == "page":
            return ""
        try:
            url = url_for_browser(await self._locate_console(), request.header(b"host") or "")
        except (DynamoError, OSError):
            return ""
        return f"{url}{CONSOLE_PATH}" if url else ""

    async def icon(self, exchange: Exchange) -> None:
        """GET /favicon.ico: the icon that browsers ask for by themselves."""
        exchange.response.send(200, (*ICON_HEADERS, *exchange.headers), ICON)
