"""Orders to a worker to sleep and to wake up, and where its record tells that it sleeps."""

from __future__ import annotations

import msgspec

from dynamo.core.errors import DECODE_ERRORS, ProtocolError
from dynamo.runtime.calls.instances import Instance

SLEEP_ENDPOINT = "sleep"
MODEL_KEY = "model"
SLEEP_LEVEL_KEY = "sleep_level"
"""The capability of an instance of the endpoint: the level at which the worker sleeps, 0: awake."""
SLEEP_LEVELS = (1, 2)


class SleepOrder(msgspec.Struct, frozen=True):
    """The order to sleep at a level of `SLEEP_LEVELS`, or to wake up (0)."""

    level: int


class SleepAnswer(msgspec.Struct, frozen=True):
    """The level of the worker after an order, whether that has changed it, and the seconds that it
    took, without the time in which requests ended or moved."""

    level: int
    changed: bool
    seconds: float = 0.0


encode_sleep_order = msgspec.json.Encoder().encode
_decode_order = msgspec.json.Decoder(SleepOrder).decode


def decode_sleep_order(payload: bytes) -> SleepOrder:
    """Return the order in a payload. Raises `ProtocolError`."""
    try:
        order = _decode_order(payload)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"not an order to sleep: {error}") from error
    if order.level not in (0, *SLEEP_LEVELS):
        raise ProtocolError(f"there is no level of sleep {order.level}: 0 wakes, 1 and 2 are known")
    return order


def sleep_level(instance: Instance) -> int:
    """Return the level at which the worker of an instance sleeps; 0: awake."""
    level = instance.capabilities.get(SLEEP_LEVEL_KEY)
    return level if isinstance(level, int) else 0
