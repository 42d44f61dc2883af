"""The table of HTTP routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from dynamo.application.exchange import Exchange
from dynamo.application.foreign_paths import (
    MAX_PATH_SHOWN,
    ROOT,
    foreign_path_error,
    not_found_error,
)
from dynamo.application.http_errors import WrongMethod

Route = Callable[[Exchange], Awaitable[object]]


class RouteTable:
    """Finds routes by exact path, or by prefix for table keys that end in a slash."""

    def __init__(self, table: Mapping[str, Mapping[str, Route]]) -> None:
        exact = {path: table[path] for path in table if path == ROOT or path[-1] != "/"}
        self._exact = exact
        self._prefixes = {path: table[path] for path in table if path not in exact}

    def find(self, method: str, path: str) -> Route:
        """Return the route. Raises `WrongMethod`, or `NotFound` with the nearest path as hint."""
        methods = self._exact.get(path) or self._by_prefix(path)
        if methods is None:
            raise not_found_error(method, path, self._exact)
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            if (error := foreign_path_error(method, path)) is not None:
                raise error
            raise WrongMethod(method, path[:MAX_PATH_SHOWN], ", ".join(methods))
        return route

    def _by_prefix(self, path: str) -> Mapping[str, Route] | None:
        for prefix, methods in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods
        return None
