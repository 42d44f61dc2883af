"""The metrics at the status port of another process."""

from __future__ import annotations

import asyncio
from contextlib import closing
from http import HTTPStatus
from typing import Final

from dynamo.communication.http.client import HttpClient
from dynamo.core.errors import ConfigError, PlaneUnavailable

SCRAPE_TIMEOUT_S: Final = 2.0


async def scrape(
    status_url: str, path: str = "/metrics", timeout_s: float = SCRAPE_TIMEOUT_S
) -> str:
    """Return the metrics at a status port. Raises `PlaneUnavailable`, with why there are none."""
    try:
        with closing(HttpClient(status_url, {}, None)) as client:
            async with asyncio.timeout(timeout_s):
                answer = await client.send("GET", path)
    except (OSError, TimeoutError, ConfigError) as error:
        raise PlaneUnavailable(str(error) or "timeout") from None
    if answer.status != HTTPStatus.OK:
        raise PlaneUnavailable(f"status {answer.status}")
    return answer.body.decode(errors="replace")
