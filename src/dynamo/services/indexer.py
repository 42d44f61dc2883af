"""`dynamo indexer`: one index of the workers' caches, which several routers ask."""

from __future__ import annotations

import logging

from dynamo.communication.requests import Outgoing
from dynamo.core.errors import ProtocolError
from dynamo.core.hashing import unpack_hashes
from dynamo.core.settings.schema import Settings
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.process import run_process
from dynamo.scheduling.index.remote import INDEXER, MATCH, MODES, encode
from dynamo.scheduling.index.view_metrics import declare_view
from dynamo.scheduling.router.placing.fleet import Fleet
from dynamo.services.index_file import IndexFile
from dynamo.services.index_view import follow_workers, new_view
from dynamo.services.way import WORKER

log = logging.getLogger(__name__)


def run_indexer(settings: Settings) -> int:
    """The process; returns its exit code."""
    return run_process(Indexer().attach, settings, INDEXER, INDEXER)


class Indexer:
    """Follows the KV events of all workers of the namespace; answers `match` and `modes`."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Raises `ConfigError` where a saved index cannot be used."""
        self._runtime = runtime
        self._view = new_view(runtime)
        declare_view(runtime.metrics, lambda: (self._view,))
        about = runtime.settings.index
        self._file = IndexFile(about.file, self._view.block_tokens, runtime.clock)
        if about.file:
            blocks = await self._file.restore(self._view.index)
            log.info("index restored", extra={"fields": {"blocks": blocks, "file": about.file}})
        namespace = runtime.namespace()
        await follow_workers(runtime, self._view, f"{namespace.name}.{WORKER}")
        self._workers = await namespace.component(WORKER).endpoint("generate").client()
        self._fleet = Fleet()
        self._workers.on_change(self._announced)
        self._announced()
        component = namespace.component(INDEXER)
        await component.endpoint(MATCH).serve(self._match)
        await component.endpoint(MODES).serve(self._modes)
        if about.file:
            runtime.tasks.start(self._forget_the_dead(), "restored workers")
            runtime.tasks.start(self._keep_saving(), "index file")
            runtime.at_shutdown(self._save_last)
        log.info("indexer serves", extra={"fields": {"blocks": self._view.index.blocks}})

    def _announced(self) -> None:
        self._fleet.replace(self._workers.instances)
        self._view.cacheless(self._fleet.cacheless)

    async def _match(self, payload: bytes, outgoing: Outgoing) -> None:
        """Hashes as packed u64 -> msgpack {worker: blocks}."""
        try:
            hashes = unpack_hashes(payload)
        except ValueError as error:
            raise ProtocolError(f"not packed block hashes: {error}") from error
        outgoing.send(encode(self._view.index.match(hashes)))

    async def _modes(self, payload: bytes, outgoing: Outgoing) -> None:
        """Msgpack {worker: mode}, of all that are there."""
        del payload
        outgoing.send(encode(self._view.modes(book.name for book in self._fleet.books)))

    async def _forget_the_dead(self) -> None:
        """Workers of the file that nobody has heard of since are no more."""
        await self._runtime.clock.sleep(self._runtime.settings.runtime.lease_ttl)
        for worker in set(self._view.index.workers) - self._view.modes().keys():
            self._view.drop(worker)

    async def _keep_saving(self) -> None:
        about = self._runtime.settings.index
        while True:
            await self._runtime.clock.sleep(about.save_every)
            await self._save()

    async def _save_last(self, drain_s: float) -> None:
        del drain_s
        await self._save()

    async def _save(self) -> None:
        try:
            await self._file.save(self._view.index)
        except OSError as error:
            fields = {"file": self._runtime.settings.index.file, "error": str(error)}
            log.warning("the index cannot be saved", extra={"fields": fields})
