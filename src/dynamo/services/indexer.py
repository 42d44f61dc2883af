"""`dynamo indexer`: one index of the workers' KV caches for several routers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dynamo.communication.events import Event
from dynamo.communication.requests import ResponseWriter
from dynamo.core.context import Context
from dynamo.core.errors import ProtocolError
from dynamo.core.hashing import unpack_hashes
from dynamo.core.kv_events import KV_EVENTS_SUBJECT, model_subject, split_worker_name, subject_model
from dynamo.core.settings.schema import Settings
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.process import run_process
from dynamo.scheduling.index.cache_view import CacheView, CacheViewMode, IndexMatch
from dynamo.scheduling.index.cache_view_metrics import declare_cache_view_metrics
from dynamo.scheduling.index.remote_index import (
    INDEXER_COMPONENT,
    MATCH_ENDPOINT,
    MODEL_KEY,
    MODES_ENDPOINT,
    encode_indexer_reply,
)
from dynamo.scheduling.index.removed_blocks import RemovedBlocks
from dynamo.scheduling.index.tiered_index import TierRun
from dynamo.scheduling.router.costs.pair_price import FLEXIBLE
from dynamo.scheduling.workers.workers import WorkerStates
from dynamo.services.cache_views import create_cache_view
from dynamo.services.index_file import IndexFile
from dynamo.services.model_pipeline import WORKER_COMPONENT

log = logging.getLogger(__name__)


def run_indexer(settings: Settings) -> int:
    """Run the indexer process and return its exit code."""
    return run_process(IndexerService().attach, settings, INDEXER_COMPONENT, INDEXER_COMPONENT)


class IndexerService:
    """Indexes the KV events of all workers of the namespace, each model's apart; answers `match`
    and `modes`. The view of the model "" has what was restored, of any model."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Start serving. Raises `ConfigError` if the saved index is unusable."""
        self._runtime = runtime
        self._worker_states = WorkerStates()
        self._views: dict[str, CacheView] = {}
        view = self._open_view("")
        view.count_lost_events = runtime.events.count_lost_events
        declare_cache_view_metrics(runtime.metrics, self._views.values)
        settings = runtime.settings.index
        self._index_file = IndexFile(settings.file, view.block_tokens, runtime.clock)
        if settings.file:
            blocks = await self._index_file.restore(view.device_index)
            log.info("index restored", extra={"fields": {"blocks": blocks, "file": settings.file}})
        namespace = runtime.namespace()
        subject = model_subject(f"{namespace.name}.{WORKER_COMPONENT}", KV_EVENTS_SUBJECT)
        await runtime.events.subscribe(subject, self._on_event)
        workers = namespace.component(WORKER_COMPONENT)
        self._worker_client = await workers.endpoint("generate").client()
        self._worker_client.on_change(self._on_instances_changed)
        self._on_instances_changed()
        component = namespace.component(INDEXER_COMPONENT)
        await component.endpoint(MATCH_ENDPOINT).serve(self._handle_match)
        await component.endpoint(MODES_ENDPOINT).serve(self._handle_modes)
        if settings.file:
            runtime.tasks.start(self._drop_absent_workers(), "restored workers")
            runtime.tasks.start(self._save_periodically(), "index file")
            runtime.add_shutdown_hook(lambda _: self._save())
        blocks = view.device_index.block_count
        log.info("indexer serves", extra={"fields": {"blocks": blocks}})

    def _open_view(self, model: str) -> CacheView:
        view = self._views[model] = create_cache_view(self._runtime)
        if self._runtime.settings.router.disaggregation.effective_mode == FLEXIBLE:
            view.removed_blocks = RemovedBlocks()
        view.set_cacheless_workers(self._worker_states.cacheless)
        return view

    def _on_event(self, event: Event) -> None:
        """Pass an event to the view of its model. A view without workers is dropped."""
        model, restored = subject_model(event.subject), self._views[""]
        view = self._views.get(model) or self._open_view(model)
        if view is not restored and event.publisher in restored.device_index.workers:
            restored.remove_worker(event.publisher)
        view.receive(event)
        if event.kind == "gone" and view is not restored and not view.get_modes():
            view.close()
            restored.event_counts.update(view.event_counts)
            del self._views[model]

    def _on_instances_changed(self) -> None:
        self._worker_states.update_instances(self._worker_client.instances)
        for view in self._views.values():
            view.set_cacheless_workers(self._worker_states.cacheless)

    def _asked_views(self, context: Context) -> Sequence[CacheView]:
        """Return the views that know the workers of the model which a query names, or all."""
        model = context.metadata.get(MODEL_KEY)
        if model is None:
            return list(self._views.values())
        return [view for name in ("", model) if (view := self._views.get(name)) is not None]

    async def _handle_match(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Answer packed u64 block hashes with an `IndexMatch` in msgpack."""
        try:
            hashes = unpack_hashes(payload)
        except ValueError as error:
            raise ProtocolError(f"not packed block hashes: {error}") from error
        overlaps, runs, share = dict[str, int](), dict[str, list[TierRun]](), 0.0
        for view in self._asked_views(outgoing.context):
            own = view.device_index.match(hashes)
            overlaps |= own
            if view.tiers.lower:
                runs |= view.tiers.lower.find_runs(hashes, own)
            if view.removed_blocks is not None:
                cached = max(own.values(), default=0)
                view.removed_blocks.on_prompt(hashes, cached / max(1, len(hashes)))
                share = max(share, view.removed_blocks.asked_share)
        outgoing.send(encode_indexer_reply(IndexMatch(overlaps, runs, share)))

    async def _handle_modes(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Answer with msgpack {worker: cache view mode} of all live workers of the model."""
        del payload
        model, instances = outgoing.context.metadata.get(MODEL_KEY), self._worker_client.instances
        names = {
            worker.name
            for worker in self._worker_states.workers
            if model is None
            or (instance := instances.get(split_worker_name(worker.name)[0])) is None
            or instance.capabilities.get("model", model) == model
        }
        modes = dict[str, CacheViewMode]()
        for view in self._asked_views(outgoing.context):
            modes |= view.get_modes(names - modes.keys())
        outgoing.send(encode_indexer_reply(modes))

    async def _drop_absent_workers(self) -> None:
        """Remove restored workers that have sent no event for the time of a lease."""
        await self._runtime.clock.sleep(self._runtime.settings.runtime.lease_ttl)
        view = self._views[""]
        for worker in set(view.device_index.workers) - view.get_modes().keys():
            view.remove_worker(worker)

    async def _save_periodically(self) -> None:
        while True:
            await self._runtime.clock.sleep(self._runtime.settings.index.save_every)
            await self._save()

    async def _save(self) -> None:
        try:
            indexes = [view.device_index for view in self._views.values()]
            await self._index_file.save(*indexes)
        except OSError as error:
            fields = {"file": self._runtime.settings.index.file, "error": str(error)}
            log.warning("saving the index failed", extra={"fields": fields})
