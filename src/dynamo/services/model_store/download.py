"""A download of one model by a process: from peers, and by one of all processes from its source."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from threading import Event
from typing import Any

from msgspec.structs import replace

from dynamo.core.errors import DynamoError, ModelUnavailable, Overloaded, PlaneUnavailable
from dynamo.core.tasks import BackgroundTasks, wait_at_most
from dynamo.models.downloads.fetch_counts import FETCHED, PEER
from dynamo.models.downloads.fetching import SourceReader, offline_error, open_source
from dynamo.models.downloads.sources import ModelSpec, Source, SourceUnavailable, changed_error
from dynamo.models.file_cache import ProgressCallback, ignore_progress
from dynamo.models.shelf.manifest import Manifest
from dynamo.models.shelf.partial import PartialModel, ShelfUnavailable
from dynamo.models.shelf.shelf import ShelfModel
from dynamo.services.model_store.daemon_thread import run_in_daemon
from dynamo.services.model_store.files import OfferedModel, offer_whole
from dynamo.services.model_store.records import PeerRecords, StoreRecord, model_key, store_prefix
from dynamo.services.model_store.scheduler import SOURCE, PieceScheduler
from dynamo.services.model_store.store import ModelStore

log = logging.getLogger(__name__)

STEP_S = 0.05
LOCK_POLL_S = 0.2
CALL_TIMEOUT_S = 10.0
HASHING_TIMEOUT_S = 600.0
"""A peer hashes a folder that it serves in its place when the folder is first asked for."""
FAILURE_SHOWN_S = 1.0
"""A failure stays in discovery for this time, so that all who wait have its reason."""
RETRY_AFTER_S = 30.0
STORE_DELAY_S = 5.0
"""A store of the cluster begins to fetch a model within this time."""
PEERS_ONLY = "from peers only"


class Download:
    """Fetches a model to the shelf, of which the caller holds the lock. Without a `source` only
    peers are asked."""

    def __init__(
        self,
        store: ModelStore,
        spec: ModelSpec,
        progress: ProgressCallback,
        *,
        with_weights: bool,
        source: Source | None,
    ) -> None:
        self._store = store
        self._spec = spec
        self._key = key = model_key(spec, with_weights=with_weights)
        self._with_weights = with_weights
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._stopped = Event()
        on_busy = self._from_threads(self._on_busy)
        self._reader = SourceReader(source, self._stopped, on_busy) if source else None
        self._source_manifest: Manifest | None = None
        self._clock = store.runtime.clock
        self._tasks = BackgroundTasks(on_failure=self._on_failure)
        own = StoreRecord("fetching", is_store=store.is_store, reason="" if source else PEERS_ONLY)
        self._records = PeerRecords(store.runtime, key, own)
        self._error = offline_error(spec)
        self._failure: BaseException | None = None
        self._left_out: dict[str, str] = {}
        self._peer_digests: dict[str, dict[int, bytes]] = {}
        self._peer_tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._began = self._clock.now()
        self._partial: PartialModel | None = None
        self._offer: OfferedModel
        self._scheduler = PieceScheduler((), store.runtime.rng)

    async def run(self) -> ShelfModel:
        """Return the model when it is whole. Raises `ModelUnavailable`."""
        try:
            return await self._run()
        except ModelUnavailable as error:
            await self._announce_failure(error)
            raise
        finally:
            self._stopped.set()
            await self._tasks.close()
            if self._partial is not None:
                self._partial.close()

    async def _run(self) -> ShelfModel:
        records = self._records
        await records.announce()
        self._tasks.start(records.follow(), "records of the model store")
        await records.known.wait()
        while self._partial is None:
            if (manifest := await self._find_manifest()) is None:
                await self._wait()
            else:
                self._partial = await self._start(manifest)
        while not self._partial.is_complete:
            await self._step(self._partial)
        return await self._finish(self._partial)

    def _from_threads(self, callback: Callable[..., None]) -> Callable[..., object]:
        """Return a function for any thread that calls `callback` in the event loop."""
        return lambda *values: self._loop.call_soon_threadsafe(callback, *values)

    async def _wait(self) -> None:
        """Wait for changes. Raises what ends this download."""
        if self._failure is not None:
            raise self._failure
        if not self._may_wait_for_store():
            self._records.check_hope(tuple(self._left_out), self._error)
        self._records.changed.clear()
        await wait_at_most(self._records.changed.wait(), STEP_S)

    def _may_wait_for_store(self) -> bool:
        """Whether a store of the cluster may begin to fetch the model yet."""
        stores = (
            each.capabilities.get("is_store") for each in self._store.peers.instances.values()
        )
        return self._clock.now() - self._began < STORE_DELAY_S and any(stores)

    async def _find_manifest(self) -> Manifest | None:
        """Take the manifest of a peer, or ask the source if that is up to this process."""
        others = self._records.others
        for peer in sorted(self._ready_peers(), key=lambda peer: not others[peer].commit):
            timeout_s = CALL_TIMEOUT_S if others[peer].commit else HASHING_TIMEOUT_S
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._store.read_manifest(peer, self._key)
            except (DynamoError, TimeoutError) as error:
                self._leave_out(peer, str(error) or "it does not answer")
        if not await self._records.elect():
            return None
        return await self._resolve(
            await self._clock.offload(self._store.shelf.started, self._spec.name)
        )

    async def _resolve(self, known: list[Manifest]) -> Manifest | None:
        """Ask the source which files the model has. None: this process cannot ask it."""
        if self._reader is None:
            return None
        try:
            resolve = partial(self._reader.resolve, known)
            self._source_manifest = await run_in_daemon(resolve, self._stopped)
        except SourceUnavailable as error:
            await self._on_source_error(error)
        else:
            await self._on_source_answer()
        return self._source_manifest

    async def _start(self, manifest: Manifest) -> PartialModel:
        """Begin to fetch the files of a manifest, and offer what is here of them."""
        manifest = replace(manifest, name=self._spec.name, with_weights=self._with_weights)
        open_partial = self._store.shelf.open_partial
        fetched = await self._clock.offload(open_partial, manifest, self._progress)
        offer = OfferedModel(fetched.manifest, fetched.read, tuple(fetched.digests.items()))
        self._offer = self._store.server.models[self._key] = offer
        fetched.on_piece = self._from_threads(offer.add)
        numbers = range(len(manifest.pieces))
        missing = (number for number in numbers if number not in fetched.digests)
        self._scheduler = PieceScheduler(missing, self._store.runtime.rng)
        await self._records.announce(commit=manifest.commit, total_bytes=manifest.size_bytes)
        return fetched

    async def _step(self, fetched: PartialModel) -> None:
        """Make the requests that are due, and wait for what they bring."""
        now = self._clock.now()
        self._scheduler.use_source(await self._records.elect())
        for peer in self._ready_peers():
            if peer not in self._peer_tasks:
                self._start_call(peer, self._follow_peer(peer, fetched))
        for peer in self._scheduler.hanging(now):
            self._leave_out(peer, "it does not answer")
        for peer, number in self._scheduler.next_requests(now):
            if peer == SOURCE:
                self._tasks.start(self._read_from_source(fetched, number), f"piece {number}")
            else:
                self._start_call(peer, self._read_from_peer(fetched, peer, number))
        await self._records.announce_progress(fetched.done_bytes)
        await self._wait()

    async def _finish(self, fetched: PartialModel) -> ShelfModel:
        for peer in self._scheduler.silent(self._clock.now()):
            self._leave_out(peer, "it has sent nothing")
        shelf, offload, revision = self._store.shelf, self._clock.offload, self._spec.revision
        model = await offload(shelf.finish, fetched, revision, self._progress)
        whole = await offload(offer_whole, model)
        self._offer.read, self._offer.manifest = whole.read, whole.manifest
        size = model.manifest.size_bytes
        await self._records.announce(state="ready", asks_source=False, reason="", done_bytes=size)
        fields = {"model": self._key, "mb": round(size / 1e6), "left_out": self._left_out}
        log.info("model fetched", extra={"fields": fields})
        return model

    async def _read_from_peer(self, fetched: PartialModel, peer: str, number: int) -> None:
        began = self._clock.now()
        digest = self._peer_digests[peer][number]

        def on_bytes() -> None:
            self._scheduler.on_bytes(peer, self._clock.now())

        try:
            read = self._store.read_piece
            parts = await read(peer, self._key, fetched.manifest, number, on_bytes)
            if number not in fetched.digests:
                await self._clock.offload(fetched.write, number, parts, digest)
        except Overloaded:
            self._scheduler.on_busy(peer, number, self._clock.now())
        except ValueError:
            self._leave_out(peer, f"its piece {number} is damaged")
        except ShelfUnavailable:
            raise
        except DynamoError as error:
            self._leave_out(peer, error.message)
        else:
            self._on_received(fetched, peer, number, began)

    async def _read_from_source(self, fetched: PartialModel, number: int) -> None:
        reader, began = self._reader, self._clock.now()
        try:
            if self._source_manifest is None:
                resolved = await self._resolve([fetched.manifest])
                if resolved is not None and resolved.commit != fetched.manifest.commit:
                    raise changed_error(fetched.manifest)
            if reader is None or self._source_manifest is None:
                self._scheduler.on_failed(SOURCE, number)
                return
            await run_in_daemon(partial(reader.fetch, fetched, number), self._stopped)
        except SourceUnavailable as error:
            self._scheduler.on_failed(SOURCE, number)
            await self._on_source_error(error)
        else:
            self._on_received(fetched, SOURCE, number, began)
            await self._on_source_answer()

    def _on_received(self, fetched: PartialModel, peer: str, number: int, began: float) -> None:
        now, name = self._clock.now(), self._spec.name
        if peer != SOURCE:
            FETCHED.add(PEER, fetched.manifest.pieces[number].size_bytes, now - began)
        self._scheduler.on_received(peer, number, now)
        self._progress(f"fetching {name}", fetched.done_bytes, fetched.manifest.size_bytes)
        self._records.changed.set()

    async def _on_source_error(self, error: SourceUnavailable) -> None:
        """Leave a source that is out of reach from here to another process."""
        self._error = error
        await self._records.announce(asks_source=False, reason=error.message)

    def _on_busy(self, text: str, wait_s: float) -> None:
        """Announce that a busy source is waited for, while all others wait for this process."""
        log.warning("the source of a model is busy", extra={"fields": {"reason": text}})
        self._progress(text, 0, 0)
        again_s = self._clock.wall() + wait_s
        self._tasks.start(self._records.announce(reason=text, again_s=again_s), "a busy source")

    async def _on_source_answer(self) -> None:
        """Announce that the source is not busy any more."""
        if self._records.own.asks_source and self._records.own.reason:
            await self._records.announce(reason="", again_s=0.0)

    def _ready_peers(self) -> list[str]:
        """Return the peers that may have pieces: of the same commit, and not left out."""
        commit = self._records.own.commit
        return [
            peer
            for peer, record in self._records.others.items()
            if peer not in self._left_out
            and peer in self._store.peers.instances
            and (record.state == "ready" or (record.state == "fetching" and record.commit))
            and (not commit or record.commit in {"", commit})
        ]

    async def _follow_peer(self, peer: str, fetched: PartialModel) -> None:
        """Learn of the pieces of a peer until it has all or is gone."""
        digests = self._peer_digests.setdefault(peer, {})

        def on_pieces(pieces: dict[int, bytes]) -> None:
            digests.update(pieces)
            self._scheduler.add_pieces(peer, pieces)
            self._records.changed.set()

        try:
            await self._store.follow(peer, self._key, fetched.manifest.commit, on_pieces)
        except DynamoError as error:
            self._leave_out(peer, error.message)

    def _start_call(self, peer: str, call: Coroutine[Any, Any, None]) -> None:
        """Start a call of a peer, which ends when the peer is left out."""
        tasks = self._peer_tasks.setdefault(peer, [])
        tasks[:] = [task for task in tasks if not task.done()]
        tasks.append(self._tasks.start(call, f"{self._key} from {peer}"))

    def _leave_out(self, peer: str, reason: str) -> None:
        if peer in self._left_out:
            return
        self._left_out[peer] = reason
        FETCHED.failures[PEER] += 1
        self._scheduler.remove_peer(peer)
        current = asyncio.current_task()
        for task in self._peer_tasks.get(peer, ()):
            if task is not current:
                task.cancel()
        fields = {"model": self._key, "peer": peer, "reason": reason}
        log.warning("a peer of the model store is left out", extra={"fields": fields})
        self._records.changed.set()

    async def _announce_failure(self, error: ModelUnavailable) -> None:
        """Tell all who wait why the source has not given the model. A lack of this
        process alone is not told: another one may ask."""
        self._store.server.models.pop(self._key, None)
        if isinstance(error, ShelfUnavailable) or not self._records.own.asks_source:
            await self._records.withdraw()
            return
        again = self._clock.wall() + (error.retry_after_s or RETRY_AFTER_S)
        await self._records.announce(
            state="failed", asks_source=False, reason=error.message, again_s=again
        )
        if self._records.others:
            await self._clock.sleep(FAILURE_SHOWN_S)

    def _on_failure(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._records.changed.set()


async def fetch_model(
    store: ModelStore,
    spec: ModelSpec,
    progress: ProgressCallback = ignore_progress,
    *,
    with_weights: bool = True,
) -> ShelfModel:
    """Return a model on the shelf and offer it to peers, fetched if it is not there. Raises
    `ModelUnavailable`."""
    offload = store.runtime.clock.offload
    find = partial(store.shelf.find, spec.name, spec.revision, with_weights=with_weights)
    while (model := await offload(find)) is None:
        with store.shelf.lock_model(spec.name) as is_own:
            if is_own:
                if await offload(find) is not None:
                    continue
                opened = partial(open_source, spec, with_weights=with_weights)
                source = None if store.is_offline else await offload(opened)
                return await Download(
                    store, spec, progress, with_weights=with_weights, source=source
                ).run()
        for manifest, done in await offload(store.shelf.progress, spec.name):
            progress(f"fetching {spec.name}", done, manifest.size_bytes)
        await store.runtime.clock.sleep(LOCK_POLL_S)
    await store.offer_model(spec, model)
    return model


async def fetch_from_peers(
    store: ModelStore, spec: ModelSpec, progress: ProgressCallback = ignore_progress
) -> ShelfModel | None:
    """Return a model that peers have, or None if none has it or it cannot be read from them."""
    namespace = store.runtime.settings.runtime.namespace
    try:
        if not await store.runtime.discovery.get(store_prefix(namespace, model_key(spec))):
            return None
        with store.shelf.lock_model(spec.name) as is_own:
            if not is_own:
                return None
            download = Download(store, spec, progress, with_weights=True, source=None)
            return await download.run()
    except (PlaneUnavailable, ModelUnavailable) as error:
        fields = {"model": spec.name, "reason": error.message}
        log.info("no peer has the model", extra={"fields": fields})
        return None
