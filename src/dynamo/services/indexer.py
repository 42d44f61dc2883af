"""`dynamo indexer`: one index of the workers' caches, which several routers ask."""

from __future__ import annotations

import logging

from dynamo.communication.requests import ResponseWriter
from dynamo.core.errors import ProtocolError
from dynamo.core.hashing import unpack_hashes
from dynamo.core.settings.schema import Settings
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.process import run_process
from dynamo.scheduling.index.cache_view_metrics import declare_cache_view_metrics
from dynamo.scheduling.index.remote_index import (
    INDEXER_COMPONENT,
    MATCH_ENDPOINT,
    MODES_ENDPOINT,
    encode_indexer_reply,
)
from dynamo.scheduling.router.worker_state import WorkerStates
from dynamo.services.cache_views import create_cache_view, follow_kv_events
from dynamo.services.index_file import IndexFile
from dynamo.services.model_pipeline import WORKER_COMPONENT

log = logging.getLogger(__name__)


def run_indexer(settings: Settings) -> int:
    """The process; returns its exit code."""
    return run_process(IndexerService().attach, settings, INDEXER_COMPONENT, INDEXER_COMPONENT)


class IndexerService:
    """Follows the KV events of all workers of the namespace; answers `match` and `modes`."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Raises `ConfigError` where a saved index cannot be used."""
        self._runtime = runtime
        self._cache_view = create_cache_view(runtime)
        declare_cache_view_metrics(runtime.metrics, lambda: (self._cache_view,))
        about = runtime.settings.index
        self._index_file = IndexFile(about.file, self._cache_view.block_tokens, runtime.clock)
        if about.file:
            blocks = await self._index_file.restore(self._cache_view.device_index)
            log.info("index restored", extra={"fields": {"blocks": blocks, "file": about.file}})
        namespace = runtime.namespace()
        await follow_kv_events(runtime, self._cache_view, f"{namespace.name}.{WORKER_COMPONENT}")
        self._worker_client = (
            await namespace.component(WORKER_COMPONENT).endpoint("generate").client()
        )
        self._worker_states = WorkerStates()
        self._worker_client.on_change(self._on_instances_changed)
        self._on_instances_changed()
        component = namespace.component(INDEXER_COMPONENT)
        await component.endpoint(MATCH_ENDPOINT).serve(self._handle_match)
        await component.endpoint(MODES_ENDPOINT).serve(self._handle_modes)
        if about.file:
            runtime.tasks.start(self._drop_absent_workers(), "restored workers")
            runtime.tasks.start(self._save_periodically(), "index file")
            runtime.add_shutdown_hook(self._save_at_shutdown)
        log.info(
            "indexer serves",
            extra={"fields": {"blocks": self._cache_view.device_index.block_count}},
        )

    def _on_instances_changed(self) -> None:
        self._worker_states.update_instances(self._worker_client.instances)
        self._cache_view.set_cacheless_workers(self._worker_states.cacheless)

    async def _handle_match(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Hashes as packed u64 -> msgpack {worker: blocks}."""
        try:
            hashes = unpack_hashes(payload)
        except ValueError as error:
            raise ProtocolError(f"not packed block hashes: {error}") from error
        outgoing.send(encode_indexer_reply(self._cache_view.device_index.match(hashes)))

    async def _handle_modes(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Msgpack {worker: mode}, of all that are there."""
        del payload
        outgoing.send(
            encode_indexer_reply(
                self._cache_view.get_modes(book.name for book in self._worker_states.workers)
            )
        )

    async def _drop_absent_workers(self) -> None:
        """Workers of the file that nobody has heard of since are no more."""
        await self._runtime.clock.sleep(self._runtime.settings.runtime.lease_ttl)
        for worker in (
            set(self._cache_view.device_index.workers) - self._cache_view.get_modes().keys()
        ):
            self._cache_view.remove_worker(worker)

    async def _save_periodically(self) -> None:
        about = self._runtime.settings.index
        while True:
            await self._runtime.clock.sleep(about.save_every)
            await self._save()

    async def _save_at_shutdown(self, drain_s: float) -> None:
        del drain_s
        await self._save()

    async def _save(self) -> None:
        try:
            await self._index_file.save(self._cache_view.device_index)
        except OSError as error:
            fields = {"file": self._runtime.settings.index.file, "error": str(error)}
            log.warning("the index cannot be saved", extra={"fields": fields})
