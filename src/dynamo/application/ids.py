"""Names of requests."""

from __future__ import annotations

import os
import re
from itertools import count

_FOREIGN = re.compile(r"[^A-Za-z0-9._:\-]")
MAX_LENGTH = 128


class RequestIds:
    """Unique over processes: a random start, then a counter."""

    def __init__(self) -> None:
        self._start = os.urandom(8).hex()
        self._count = count(1)

    def new(self) -> str:
        """A fresh id."""
        return f"{self._start}{next(self._count):08x}"

    def unique(self, given: str) -> str:
        """An id that begins with a client's own, which need not be unique."""
        return f"{given}-{self._start[:8]}{next(self._count):x}"


def sanitised(given: str | None) -> str:
    """A client's x-request-id without what could hurt logs or headers; "" if nothing is left."""
    return _FOREIGN.sub("", given)[:MAX_LENGTH] if given else ""
