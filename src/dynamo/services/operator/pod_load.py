"""The requests that a pod answers now, by the metrics of its processes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from dynamo.communication.addresses import bracket_ipv6
from dynamo.communication.http.scrape import scrape
from dynamo.core.errors import PlaneUnavailable
from dynamo.operations.alerts.evaluator import parse_samples
from dynamo.operations.operator.pods import STATUS_PORT

READ_S = 1.0
GAUGES = frozenset({"dynamo_worker_running_requests", "dynamo_frontend_inflight_requests"})
ReadLoad = Callable[[Mapping[str, Any]], Coroutine[Any, Any, float | None]]
"""Returns the running requests of a pod, None if they cannot be read."""


async def read_pod_load(pod: Mapping[str, Any]) -> float | None:
    """Return the running requests of a pod, None if its processes do not tell them."""
    address = (pod.get("status") or {}).get("podIP")
    if not address:
        return None
    url = f"http://{bracket_ipv6(address)}:{STATUS_PORT}"
    try:
        text = await scrape(url, "/metrics/all", READ_S)
    except PlaneUnavailable:
        return None
    samples = list(parse_samples(text, GAUGES, {}))
    return sum(sample.value for sample in samples) if samples else None
