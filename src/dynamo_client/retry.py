"""When a call is tried again, and after how long."""

from __future__ import annotations

import random
import time

from dynamo_client.config import DynamoConfig
from dynamo_client.errors import (
    DynamoAPIError,
    DynamoCertificateError,
    DynamoConnectionError,
    DynamoError,
    DynamoTimeoutError,
)

RETRYABLE_STATUSES = frozenset((408, 429, 502, 503, 504))
JITTER = 0.25
MAX_RETRY_AFTER_S = 60.0
"""A server that asks for more is not waited for: the caller hears it at once."""


class ClientRetryPolicy:
    """The rule of one client."""

    def __init__(self, config: DynamoConfig, chance: random.Random) -> None:
        self._max_retries = config.max_retries
        self._delay_s = config.retry_delay
        self._rng = chance

    def next_delay_s(self, error: DynamoError, attempt: int) -> float | None:
        """Seconds until the next try after number `attempt` (from 0) failed; None: give up."""
        if attempt >= self._max_retries or not is_retryable(error):
            return None
        asked_s = getattr(error, "retry_after_s", None) or 0.0
        if asked_s > MAX_RETRY_AFTER_S:
            return None
        delay_s = self._delay_s * 2**attempt
        least_s = max(asked_s, delay_s * (1 - JITTER))
        return float(self._rng.uniform(least_s, max(asked_s, delay_s) * (1 + JITTER)))


def is_retryable(error: DynamoError) -> bool:
    """May the same request succeed later, and was it surely not answered?"""
    if isinstance(error, DynamoAPIError):
        return error.status in RETRYABLE_STATUSES
    hopeless = (DynamoTimeoutError, DynamoCertificateError)
    return isinstance(error, DynamoConnectionError) and not isinstance(error, hopeless)


def parse_retry_after(value: str) -> float | None:
    """The header's value, seconds or a date, as seconds from now."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        from email.utils import parsedate_to_datetime
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
