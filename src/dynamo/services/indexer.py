"""`dynamo indexer`: one index of the workers' KV caches for several routers."""

from __future__ import annotations

import logging

from dynamo.communication.requests import ResponseWriter
from dynamo.core.errors import ProtocolError
from dynamo.core.hashing import unpack_hashes
from dynamo.core.settings.schema import Settings
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.process import run_process
from dynamo.scheduling.index.cache_view import IndexMatch
from dynamo.scheduling.index.cache_view_metrics import declare_cache_view_metrics
from dynamo.scheduling.index.remote_index import (
    INDEXER_COMPONENT,
    MATCH_ENDPOINT,
    MODES_ENDPOINT,
    encode_indexer_reply,
)
from dynamo.scheduling.index.removed_blocks import RemovedBlocks
from dynamo.scheduling.router.costs.pair_price import FLEXIBLE
from dynamo.scheduling.workers.workers import WorkerStates
from dynamo.services.cache_views import create_cache_view, follow_kv_events
from dynamo.services.index_file import IndexFile
from dynamo.services.model_pipeline import WORKER_COMPONENT

log = logging.getLogger(__name__)


def run_indexer(settings: Settings) -> int:
    """Run the indexer process and return its exit code."""
    return run_process(IndexerService().attach, settings, INDEXER_COMPONENT, INDEXER_COMPONENT)


class IndexerService:
    """Indexes the KV events of all workers of the namespace; answers `match` and `modes`."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Start serving. Raises `ConfigError` if the saved index is unusable."""
        self._runtime = runtime
        self._cache_view = create_cache_view(runtime)
        declare_cache_view_metrics(runtime.metrics, lambda: (self._cache_view,))
        settings = runtime.settings.index
        self._index_file = IndexFile(settings.file, self._cache_view.block_tokens, runtime.clock)
        if settings.file:
            blocks = await self._index_file.restore(self._cache_view.device_index)
            log.info("index restored", extra={"fields": {"blocks": blocks, "file": settings.file}})
        if runtime.settings.router.disaggregation.effective_mode == FLEXIBLE:
            self._cache_view.removed_blocks = RemovedBlocks()
        namespace = runtime.namespace()
        await follow_kv_events(runtime, self._cache_view, f"{namespace.name}.{WORKER_COMPONENT}")
        workers = namespace.component(WORKER_COMPONENT)
        self._worker_client = await workers.endpoint("generate").client()
        self._worker_states = WorkerStates()
        self._worker_client.on_change(self._on_instances_changed)
        self._on_instances_changed()
        component = namespace.component(INDEXER_COMPONENT)
        await component.endpoint(MATCH_ENDPOINT).serve(self._handle_match)
        await component.endpoint(MODES_ENDPOINT).serve(self._handle_modes)
        if settings.file:
            runtime.tasks.start(self._drop_absent_workers(), "restored workers")
            runtime.tasks.start(self._save_periodically(), "index file")
            runtime.add_shutdown_hook(lambda _: self._save())
        blocks = self._cache_view.device_index.block_count
        log.info("indexer serves", extra={"fields": {"blocks": blocks}})

    def _on_instances_changed(self) -> None:
        self._worker_states.update_instances(self._worker_client.instances)
        self._cache_view.set_cacheless_workers(self._worker_states.cacheless)

    async def _handle_match(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Answer packed u64 block hashes with an `IndexMatch` in msgpack."""
        try:
            hashes = unpack_hashes(payload)
        except ValueError as error:
            raise ProtocolError(f"not packed block hashes: {error}") from error
        tiers, removed = self._cache_view.tiers, self._cache_view.removed_blocks
        overlaps = tiers.device.match(hashes)
        runs = tiers.lower.find_runs(hashes, overlaps) if tiers.lower else {}
        share = 0.0
        if removed is not None:
            cached = max(overlaps.values(), default=0)
            removed.on_prompt(hashes, cached / max(1, len(hashes)))
            share = removed.asked_share
        outgoing.send(encode_indexer_reply(IndexMatch(overlaps, runs, share)))

    async def _handle_modes(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Answer with msgpack {worker: cache view mode} of all live workers."""
        del payload
        names = (worker.name for worker in self._worker_states.workers)
        outgoing.send(encode_indexer_reply(self._cache_view.get_modes(names)))

    async def _drop_absent_workers(self) -> None:
        """Remove restored workers that have sent no event for the time of a lease."""
        await self._runtime.clock.sleep(self._runtime.settings.runtime.lease_ttl)
        view = self._cache_view
        for worker in set(view.device_index.workers) - view.get_modes().keys():
            view.remove_worker(worker)

    async def _save_periodically(self) -> None:
        while True:
            await self._runtime.clock.sleep(self._runtime.settings.index.save_every)
            await self._save()

    async def _save(self) -> None:
        try:
            await self._index_file.save(self._cache_view.device_index)
        except OSError as error:
            fields = {"file": self._runtime.settings.index.file, "error": str(error)}
            log.warning("saving the index failed", extra={"fields": fields})
