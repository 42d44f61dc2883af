"""Opening of a router's view of the workers' KV caches."""

from __future__ import annotations

from dynamo.core.kv_events import KV_EVENTS_SUBJECT, model_subject
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.index.remote_index import (
    INDEXER_COMPONENT,
    MATCH_ENDPOINT,
    MODES_ENDPOINT,
    RemoteIndex,
)


def create_cache_view(runtime: DistributedRuntime, block_tokens: int = 0) -> CacheView:
    """Return an empty view. `block_tokens` 0 stands for `engine.block_size`."""
    settings = runtime.settings.index
    return CacheView(
        runtime.clock,
        budget_bytes=settings.budget_bytes,
        block_tokens=block_tokens or runtime.settings.engine.block_size,
        ttl_s=settings.prediction_ttl,
    )


async def follow_kv_events(
    runtime: DistributedRuntime, view: CacheView, component: str, model: str = ""
) -> None:
    """Apply to `view` the KV events of the workers of `component` ("namespace.component") that
    serve `model`, or of all."""
    await view.subscribe(runtime.events, model_subject(component, KV_EVENTS_SUBJECT, model))


async def open_cache_view(
    runtime: DistributedRuntime, block_tokens: int, component: str, model: str = ""
) -> CacheView:
    """Return a view of the workers of `component` ("namespace.component") that serve `model`, or
    of all.

    The view has its own index; with `index.shared` it asks the `dynamo indexer` process instead.
    """
    view = create_cache_view(runtime, block_tokens)
    if not runtime.settings.index.shared:
        await follow_kv_events(runtime, view, component, model)
        return view
    indexer = runtime.namespace().component(INDEXER_COMPONENT)
    remote = RemoteIndex(
        await indexer.endpoint(MATCH_ENDPOINT).client(),
        await indexer.endpoint(MODES_ENDPOINT).client(),
        runtime.clock,
        model,
    )
    view.remote_match = remote.match
    runtime.tasks.start(remote.poll_modes(view), "modes of the shared index")
    return view
