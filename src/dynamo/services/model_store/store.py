"""The model store of a process: its shelf, what it offers to peers, and its downloads."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace

from dynamo.communication.requests import FlowWindow
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, ModelUnavailable, NotFound, WorkerFailed
from dynamo.models.downloads.fetch_counts import FETCHED
from dynamo.models.downloads.fetching import is_offline
from dynamo.models.downloads.sources import ModelSpec
from dynamo.models.file_cache import FileRef, find_file, hash_file, store_file
from dynamo.models.shelf.manifest import (
    ENTRY_BYTES,
    PIECE_BYTES,
    Manifest,
    ManifestFile,
    decode_entries,
    decode_manifest,
    digest_of,
)
from dynamo.models.shelf.shelf import Shelf, ShelfModel
from dynamo.runtime.calls.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.model_store.files import (
    FILES_ENDPOINT,
    STORE_COMPONENT,
    FileQuery,
    FileServer,
    OfferedModel,
    offer_whole,
)
from dynamo.services.model_store.records import PeerRecords, StoreRecord, model_key

WINDOW_BYTES = 2 << 20


class ModelStore:
    """Serves what this process has of models, and fetches models. `is_store`: the process keeps
    models for others, and asks sources before them. Call `start` once; the runtime closes it."""

    def __init__(
        self, runtime: DistributedRuntime, shelf: Shelf, *, is_store: bool = False
    ) -> None:
        self.runtime = runtime
        self.shelf = shelf
        self.is_store = is_store
        self.server = FileServer(runtime.clock, self._open_model)
        self.peers: Client
        self._folders: dict[str, Path] = {}

    @property
    def is_offline(self) -> bool:
        """Whether sources must not be asked."""
        return self.runtime.settings.store.offline or is_offline()

    async def start(self) -> None:
        """Serve the endpoint `files` and follow the peers."""
        endpoint = self.runtime.namespace().component(STORE_COMPONENT).endpoint(FILES_ENDPOINT)
        self.peers = await endpoint.client()
        await endpoint.serve(self.server.handle, capabilities={"is_store": self.is_store})
        FETCHED.declare(self.runtime.metrics)

    async def offer_folder(self, name: str, path: Path) -> None:
        """Offer a model that is not on the shelf: a folder or a file of this host. Its hashes are
        made when a peer asks for them."""
        key = model_key(ModelSpec(name))
        self._folders[key] = path
        await self._announce(key, StoreRecord("ready"))

    async def offer_model(self, spec: ModelSpec, model: ShelfModel) -> None:
        """Offer a whole model of the shelf."""
        key = model_key(spec, with_weights=model.manifest.with_weights)
        self.server.models[key] = await self.runtime.clock.offload(offer_whole, model)
        size = model.manifest.size_bytes
        await self._announce(key, StoreRecord("ready", model.manifest.commit, total_bytes=size))

    def offer_file(self, ref: FileRef) -> None:
        """Offer a single file of this host."""
        self.server.files[ref.sha256] = Path(ref.path)

    async def _announce(self, key: str, record: StoreRecord) -> None:
        record = replace(record, is_store=self.is_store)
        await PeerRecords(self.runtime, key, record).announce()

    async def read_piece(
        self, peer: str, key: str, manifest: Manifest, number: int, on_bytes: Callable[[], None]
    ) -> list[bytes]:
        """Return the parts of a piece of a peer, unchecked. `on_bytes` is called with each one.
        Raises the errors of calls."""
        parts: list[bytes] = []
        left = PIECE_BYTES
        window = FlowWindow(WINDOW_BYTES)

        def sink(part: bytes) -> bool:
            nonlocal left
            left -= len(part)
            parts.append(part)
            window.release(len(part))
            on_bytes()
            return left >= 0

        query = FileQuery("piece", key, manifest.commit, number)
        await self._call(peer, query, sink, window)
        return parts

    async def read_manifest(self, peer: str, key: str) -> Manifest:
        """Return the manifest of a peer. Raises `ModelUnavailable` for a wrong one."""
        content = bytearray()

        def sink(part: bytes) -> bool:
            content.extend(part)
            return True

        await self._call(peer, FileQuery("manifest", key), sink)
        return decode_manifest(bytes(content), f"{STORE_COMPONENT} {peer}")

    async def follow(
        self, peer: str, key: str, commit: str, on_pieces: Callable[[dict[int, bytes]], None]
    ) -> None:
        """Call `on_pieces` with the pieces that a peer has and their hashes, until it has all."""
        data = bytearray()

        def sink(part: bytes) -> bool:
            data.extend(part)
            on_pieces(dict(decode_entries(bytes(data))))
            del data[: len(data) - len(data) % ENTRY_BYTES]
            return True

        await self._call(peer, FileQuery("follow", key, commit), sink)

    async def _call(
        self,
        peer: str,
        query: FileQuery,
        sink: Callable[[bytes], bool],
        window: FlowWindow | None = None,
    ) -> None:
        """Call the endpoint `files` of a peer."""
        instance = self.peers.instances.get(peer)
        if instance is None:
            raise InstanceGone(f"{peer} is gone")
        payload = msgspec.msgpack.encode(query)
        context = Context(request_id=secrets.token_hex(8))
        await self.peers.call(instance, payload, context, sink, window=window)

    def _open_model(self, key: str) -> OfferedModel | None:
        path = self._folders.get(key)
        if path is None:
            return None
        return offer_whole(read_folder(key.rpartition("@")[0], path))


_stores: WeakKeyDictionary[DistributedRuntime, ModelStore] = WeakKeyDictionary()


async def open_model_store(runtime: DistributedRuntime, *, is_store: bool = False) -> ModelStore:
    """Return the store of a process, which is opened by the first call."""
    store = _stores.get(runtime)
    if store is None:
        budget = runtime.settings.store.budget
        store = _stores[runtime] = ModelStore(
            runtime, Shelf(budget_bytes=budget), is_store=is_store
        )
        await store.start()
    return store


def read_folder(name: str, path: Path) -> ShelfModel:
    """Return a folder or a file of a user as a model, with all hashes. Blocks."""
    paths = [path]
    if path.is_dir():
        paths = sorted(
            each
            for each in path.iterdir()
            if each.is_file() and each.suffix in {".json", ".jinja", ".safetensors", ".gguf"}
        )
    files = tuple(
        ManifestFile(each.name, each.stat().st_size, hash_file(each), _digests(each))
        for each in paths
    )
    parts = [(file.path, file.sha256) for file in files]
    commit = digest_of(msgspec.json.encode(parts)).hex()[:40]
    folder = path if path.is_dir() else path.parent
    return ShelfModel(Manifest(name, commit, files, "a folder"), folder, is_whole=True)


def _digests(path: Path) -> bytes:
    with path.open("rb") as file:
        return b"".join(map(digest_of, iter(lambda: file.read(PIECE_BYTES), b"")))


async def ensure_file(runtime: DistributedRuntime, ref: FileRef, namespace: str = "") -> FileRef:
    """Have a single file on this host: at its publisher's path, in the user's cache, or copied into
    the cache from a process that offers it. Raises `ModelUnavailable`."""
    offload = runtime.clock.offload
    if await offload(find_file, ref) is not None:
        return ref
    component = runtime.namespace(namespace).component(STORE_COMPONENT)
    endpoint = component.endpoint(FILES_ENDPOINT)
    peers, reason = await endpoint.client(), ""
    try:
        for instance in list(peers.instances.values()):
            query = msgspec.msgpack.encode(FileQuery("file", sha256=ref.sha256))
            context = Context(request_id=secrets.token_hex(8))
            try:
                parts = await peers.collect(instance, query, context)
                await offload(store_file, ref, b"".join(parts))
            except (NotFound, WorkerFailed, ModelUnavailable) as error:
                reason = f": {error.message}"
                continue
            return ref
    finally:
        await peers.close()
    raise ModelUnavailable(
        f"no worker serves the file {ref.name}{reason}", hint="the frontend retries"
    )
