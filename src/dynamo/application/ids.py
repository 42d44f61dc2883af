"""Names of requests."""

from __future__ import annotations

import os
import re
from itertools import count

_FORBIDDEN_CHARACTERS = re.compile(r"[^A-Za-z0-9._:\-]")
MAX_REQUEST_ID_LENGTH = 128


class RequestIds:
    """Unique over processes: a random start, then a counter."""

    def __init__(self) -> None:
        self._process_prefix = os.urandom(8).hex()
        self._counter = count(1)

    def generate(self) -> str:
        """A fresh id."""
        return f"{self._process_prefix}{next(self._counter):08x}"

    def make_unique(self, given: str) -> str:
        """An id that begins with a client's own, which need not be unique."""
        return f"{given}-{self._process_prefix[:8]}{next(self._counter):x}"


def sanitise_request_id(given: str | None) -> str:
    """A client's x-request-id without what could hurt logs or headers; "" if nothing is left."""
    return _FORBIDDEN_CHARACTERS.sub("", given)[:MAX_REQUEST_ID_LENGTH] if given else ""
