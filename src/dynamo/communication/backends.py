"""The backend of a plane, found by the scheme of its URL."""

from __future__ import annotations

from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.core.installation import install_command
from dynamo.core.plugins import PluginTable

EXTRAS = {"etcd": "etcd", "etcds": "etcd", "nats": "nats", "nixl": "nixl"}
"""The optional dependencies of dynamo-python that a scheme needs."""


def load_backend(table: PluginTable, url: str) -> Any:
    """Return the class in `table` for the scheme of `url`; it has `async open(url, ...)`.

    Raises `ConfigError` for an unknown scheme, or with the command that installs a missing library.
    """
    scheme = url.split(":", 1)[0]
    try:
        return table.load(scheme)
    except ModuleNotFoundError as error:
        if scheme not in EXTRAS or (error.name or "").startswith("dynamo"):
            raise
        raise ConfigError(
            f"{table.kind} {url!r} needs the library {error.name}",
            hint=install_command(EXTRAS[scheme]),
        ) from None
