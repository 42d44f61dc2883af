"""Payloads that several calls share, so that a connection carries them once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

_numbers = count(1)


class SharedPayload:
    """The caller's side. `number` identifies the payload in this process.

    `join(payload)` returns the whole payload of a call, for peers that know no shared payloads.
    """

    __slots__ = ("join", "number", "payload")

    def __init__(self, payload: bytes, join: Callable[[bytes], bytes]) -> None:
        self.number = next(_numbers)
        self.payload = payload
        self.join = join


class ReceivedPayload:
    """The handler's side. `value` is what a handler decoded from `payload` for all calls."""

    __slots__ = ("payload", "value")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.value: Any = None
