"""Payloads that several calls share, so that a connection carries them once."""

from __future__ import annotations

from itertools import count
from typing import Any

_numbers = count(1)


class SharedPayload:
    """The caller's side. `number` identifies the payload in this process."""

    __slots__ = ("number", "payload")

    def __init__(self, payload: bytes) -> None:
        self.number = next(_numbers)
        self.payload = payload


class ReceivedPayload:
    """The handler's side. `value` is what a handler decoded from `payload` for all calls."""

    __slots__ = ("payload", "value")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.value: Any = None
