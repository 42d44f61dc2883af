"""Which failed calls are retried, and after how long."""

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
"""A longer Retry-After is not obeyed; the error is raised at once."""


class ClientRetryPolicy:
    """Exponential backoff with jitter; a server's Retry-After is the lower bound."""

    def __init__(self, config: DynamoConfig) -> None:
        self._max_retries = config.max_retries
        self._delay_s = config.retry_delay

    def next_delay_s(self, error: DynamoError, attempt: int) -> float | None:
        """Seconds to wait after attempt number `attempt` (from 0) failed; None: do not retry."""
        if attempt >= self._max_retries or not is_retryable(error):
            return None
        retry_after_s = getattr(error, "retry_after_s", None) or 0.0
        if retry_after_s > MAX_RETRY_AFTER_S:
            return None
        delay_s = self._delay_s * 2**attempt
        min_s = max(retry_after_s, delay_s * (1 - JITTER))
        return random.uniform(min_s, max(retry_after_s, delay_s) * (1 + JITTER))


def is_retryable(error: DynamoError) -> bool:
    """Whether the same request may succeed later and has certainly not been answered."""
    if isinstance(error, DynamoAPIError):
        return error.status in RETRYABLE_STATUSES
    not_retried = (DynamoTimeoutError, DynamoCertificateError)
    return isinstance(error, DynamoConnectionError) and not isinstance(error, not_retried)


def parse_retry_after(value: str) -> float | None:
    """Convert the value of a Retry-After header, seconds or a date, to seconds from now."""
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
