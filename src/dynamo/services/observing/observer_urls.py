"""Where the observers of a namespace listen."""

from __future__ import annotations

from dynamo.core.errors import NotFound
from dynamo.runtime.distributed import DistributedRuntime

OBSERVERS_PREFIX = "/_observers/"
"""The prefix of the keys of observers in discovery; the namespace and the instance follow."""


async def find_observer_url(runtime: DistributedRuntime) -> str:
    """Return the HTTP URL of an observer of the namespace. Raises `NotFound`, and the errors of
    discovery."""
    prefix = f"{OBSERVERS_PREFIX}{runtime.settings.runtime.namespace}/"
    observers = await runtime.discovery.get(prefix)
    if not observers:
        raise NotFound(
            "no observer runs, which keeps what became of requests",
            hint="start the deployment without --no-observer, or wait until it has started",
        )
    return observers[min(observers)].decode()
