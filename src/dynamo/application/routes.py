"""The table of HTTP routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from dynamo.application.exchange import Exchange
from dynamo.application.http_errors import WrongMethod
from dynamo.core.errors import NotFound, nearest_name_hint

Route = Callable[[Exchange], Awaitable[None]]
MAX_PATH_SHOWN = 100
ABSENT = {
    "/v1/audio/": "speech and transcription",
    "/v1/images/": "generation of images",
    "/v1/videos": "generation of videos",
    "/v1/moderations": "moderation",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/conversations": "stored conversations",
    "/v1/realtime": "the Realtime API",
    "/v1/files": "uploaded files",
    "/v1/batches": "batches",
    "/v1/messages/batches": "batches",
    "/v1/fine_tuning/": "fine-tuning",
    "/v1/vector_stores": "vector stores",
}
"""Paths of OpenAI and Anthropic that this server does not have, and their names in errors."""


class RouteTable:
    """Finds routes by exact path, or by prefix for table keys that end in a slash."""

    def __init__(self, table: Mapping[str, Mapping[str, Route]]) -> None:
        self._exact = {path: methods for path, methods in table.items() if path[-1] != "/"}
        self._prefixes = {path: methods for path, methods in table.items() if path[-1] == "/"}

    def find(self, method: str, path: str) -> Route:
        """Return the route. Raises `WrongMethod`, or `NotFound` with the nearest path as hint."""
        methods = self._exact.get(path) or self._by_prefix(path)
        if methods is None:
            raise self._not_found(method, path)
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            raise WrongMethod(method, path[:MAX_PATH_SHOWN], ", ".join(methods))
        return route

    def _by_prefix(self, path: str) -> Mapping[str, Route] | None:
        for prefix, methods in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods
        return None

    def _not_found(self, method: str, path: str) -> NotFound:
        for prefix, name in ABSENT.items():
            if path.startswith(prefix):
                hint = "docs/limits.md says what is left out"
                return NotFound(f"{path[:MAX_PATH_SHOWN]}: {name}: not supported", hint=hint)
        hint = nearest_name_hint(path[:MAX_PATH_SHOWN], self._exact, cutoff=0.5)
        return NotFound(f"there is no {method} {path[:MAX_PATH_SHOWN]}", hint=hint)
