"""Removal of a model from a frontend: its requests end, then what serves them is closed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from dynamo.core.errors import PlaneUnavailable
from dynamo.models.tokenization.tokenizer import trim_heap
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.supervisors import removals_prefix

log = logging.getLogger(__name__)

POLL_S = 0.05


async def close_removed_model(
    runtime: DistributedRuntime,
    model: str,
    count_requests: Callable[[], int],
    close: Callable[[], Awaitable[None]],
) -> None:
    """Wait until a removed model has no requests at this frontend, and close it.

    A key in discovery holds its workers until then.
    """
    log.info("model removed", extra={"fields": {"model": model, "requests": count_requests()}})
    key = removals_prefix(runtime.settings.runtime.namespace, model) + runtime.instance_id
    busy = count_requests() > 0
    if busy:
        with suppress(PlaneUnavailable):
            await runtime.discovery.put(key, b"")
    while count_requests():
        await runtime.clock.sleep(POLL_S)
    if busy:
        with suppress(PlaneUnavailable):
            await runtime.discovery.delete(key)
    await close()
    del close
    # The pipeline has cycles, and a ready process freezes its objects and collects rarely.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim_heap()
