"""A router's view of the workers' caches, as the settings ask for it."""

from __future__ import annotations

from dynamo.core.kv_events import KV_EVENTS_SUBJECT
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.index.remote_index import (
    INDEXER_COMPONENT,
    MATCH_ENDPOINT,
    MODES_ENDPOINT,
    RemoteIndex,
)


def create_cache_view(runtime: DistributedRuntime, block_tokens: int = 0) -> CacheView:
    """One that knows nothing yet. `block_tokens` 0: those of the settings."""
    about = runtime.settings.index
    return CacheView(
        runtime.clock,
        budget_bytes=about.budget_bytes,
        block_tokens=block_tokens or runtime.settings.engine.block_size,
        ttl_s=about.prediction_ttl,
    )


async def follow_kv_events(runtime: DistributedRuntime, view: CacheView, component: str) -> None:
    """Hear the KV events of all workers of "namespace.component"."""
    await view.subscribe(runtime.events, f"{component}.{KV_EVENTS_SUBJECT}")


async def open_cache_view(
    runtime: DistributedRuntime, block_tokens: int, component: str
) -> CacheView:
    """Of the workers of "namespace.component": with an index of its own or, with `index.shared`,
    asking `dynamo indexer`."""
    view = create_cache_view(runtime, block_tokens)
    if not runtime.settings.index.shared:
        await follow_kv_events(runtime, view, component)
        return view
    indexer = runtime.namespace().component(INDEXER_COMPONENT)
    remote = RemoteIndex(
        await indexer.endpoint(MATCH_ENDPOINT).client(),
        await indexer.endpoint(MODES_ENDPOINT).client(),
        runtime.clock,
    )
    view.use_remote_index(remote.match)
    runtime.tasks.start(remote.poll_modes(view), "trust in the shared index")
    return view
