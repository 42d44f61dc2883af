"""The requests that a pod answers now, by the metrics of its processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import closing
from typing import Any

from dynamo.communication.addresses import bracket_ipv6
from dynamo.communication.http.client import HttpClient
from dynamo.core.errors import ConfigError
from dynamo.core.tasks import run_all
from dynamo.operations.alerts.evaluator import parse_samples
from dynamo.operations.operator.pods import STATUS_PORT

PORTS = range(STATUS_PORT, STATUS_PORT + 4)
"""A supervisor has the first port, its processes the next ones."""
READ_S = 1.0
GAUGES = frozenset({"dynamo_worker_running_requests", "dynamo_frontend_inflight_requests"})
ReadLoad = Callable[[Mapping[str, Any]], Coroutine[Any, Any, float | None]]
"""Returns the running requests of a pod, None if they cannot be read."""


async def read_pod_load(pod: Mapping[str, Any]) -> float | None:
    """Return the running requests of a pod, None if none of its processes answers."""
    address = (pod.get("status") or {}).get("podIP")
    if not address:
        return None
    loads = await run_all(*(_read_port(f"{bracket_ipv6(address)}:{port}") for port in PORTS))
    known = [load for load in loads if load is not None]
    return sum(known) if known else None


async def _read_port(address: str) -> float | None:
    """Return the running requests of the process at a status port, None if it tells of none."""
    try:
        with closing(HttpClient(f"http://{address}", {}, None)) as client:
            async with asyncio.timeout(READ_S):
                answer = await client.send("GET", "/metrics")
    except (OSError, TimeoutError, ConfigError):
        return None
    samples = list(parse_samples(answer.body.decode(errors="replace"), GAUGES, {}))
    return sum(sample.value for sample in samples) if samples else None
