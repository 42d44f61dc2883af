"""A value as it was given, and the place it came from."""

from __future__ import annotations

from typing import Any

import msgspec


class SourcedValue(msgspec.Struct, frozen=True):
    """`raw`: text, or what the file's language made of it. `where`: as messages say it, such as
    "flag --http-port", "environment DYNAMO_SERVER__HTTP_PORT" or "agg.yaml:3". `spelled`: the key
    as it was written."""

    raw: Any
    origin: str
    written_key: str = ""
