"""The bytes of a response's head."""

from __future__ import annotations

import time
from collections.abc import Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

ResponseHeaders = Sequence[tuple[str, str]]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


@lru_cache(maxsize=1)
def _date_line(second: int) -> str:
    return f"date: {formatdate(second, usegmt=True)}\r\n"


@lru_cache(maxsize=64)
def _status_line(status: int) -> str:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    return f"HTTP/1.1 {status} {phrase}\r\n"


def encode_head(status: int, headers: ResponseHeaders, framing: str) -> bytes:
    """Status line and headers, `framing` (ready lines) last. Raises ValueError on a line break
    inside a header."""
    lines = ""
    for name, value in headers:
        lines += f"{name}: {value}\r\n"
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("line break in a header")
    text = _status_line(status) + lines + _date_line(int(time.time())) + framing + "\r\n"
    return text.encode("latin-1")
