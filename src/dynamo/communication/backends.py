"""Backends by URL: a table of scheme -> "module:Class", loaded on first use."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from dynamo.core.errors import ConfigError


def load_backend(table: Mapping[str, str], url: str, plane: str) -> Any:
    """The class behind `url`'s scheme; it has `async open(url, ...)`. Raises `ConfigError`."""
    scheme = url.split(":", 1)[0]
    target = table.get(scheme)
    if target is None:
        near = difflib.get_close_matches(scheme, table, n=1)
        known = ", ".join(f"{name}:" for name in table)
        raise ConfigError(
            f"{plane} plane: no backend for {url!r}",
            hint=f"did you mean {near[0]}:?" if near else f"known: {known}",
        )
    module, _, name = target.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("dynamo"):
            raise
        extra = scheme.removesuffix("s") if scheme == "etcds" else scheme
        raise ConfigError(
            f"{plane} plane: {url!r} needs the library {error.name}",
            hint=f"pip install 'dynamo-python[{extra}]'",
        ) from None
