"""The endpoint `files`: what a process has of models, for its peers, and single files by hash."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from dynamo.communication.requests import ResponseWriter
from dynamo.core.clock import Clock
from dynamo.core.errors import DECODE_ERRORS, NotFound, Overloaded, ProtocolError
from dynamo.models.shelf.manifest import Manifest, encode_entries, encode_manifest
from dynamo.models.shelf.shelf import ShelfModel, read_piece

STORE_COMPONENT = "modelstore"
FILES_ENDPOINT = "files"
CHUNK_BYTES = 128 << 10
MAX_UPLOADS = 4
"""Pieces that a process sends at a time. Others are refused, and asked of other peers."""


class FileQuery(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of the endpoint, in msgpack.

    - `manifest` of `key`: answers with a manifest.
    - `follow` of `key` at `commit`: answers with an entry for each piece that is here or comes,
      until all are here. An entry is the number in 4 bytes, little-endian, and the hash.
    - `piece` of `key` at `commit`: answers with the bytes of piece `number`.
    - `file`: answers with the bytes of the file with the hash `sha256`.
    """

    kind: Literal["manifest", "follow", "piece", "file"]
    key: str = ""
    commit: str = ""
    number: int = 0
    sha256: str = ""


class OfferedModel:
    """A model of this process, whole or in part, that peers may read."""

    def __init__(
        self,
        manifest: Manifest,
        read: Callable[[int], bytes],
        digests: Iterable[tuple[int, bytes]],
    ) -> None:
        self.manifest = manifest
        self.read = read
        self.entries = bytearray()
        self.numbers: set[int] = set()
        self.changed = asyncio.Event()
        for number, digest in digests:
            self.add(number, digest)

    def add(self, number: int, digest: bytes) -> None:
        """Offer a piece, and tell those who follow."""
        if number in self.numbers:
            return
        self.numbers.add(number)
        self.entries += encode_entries([(number, digest)])
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def is_whole(self) -> bool:
        """Whether all pieces are offered."""
        return len(self.numbers) == len(self.manifest.pieces)


def offer_whole(model: ShelfModel) -> OfferedModel:
    """Return the offer of a whole model."""
    manifest = model.manifest
    return OfferedModel(manifest, partial(read_piece, model), enumerate(manifest.digests))


class FileServer:
    """Serves the endpoint. `models` are by key, `files` by SHA-256; `open_model(key)` finds others,
    blocking."""

    def __init__(self, clock: Clock, open_model: Callable[[str], OfferedModel | None]) -> None:
        self.models: dict[str, OfferedModel] = {}
        self.files: dict[str, Path] = {}
        self.sent_bytes = 0
        self.followers = 0
        self._uploads = 0
        self._clock = clock
        self._open_model = open_model

    async def handle(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Serve one call. Raises `NotFound`, `Overloaded` and `ProtocolError`."""
        try:
            query = msgspec.msgpack.decode(payload, type=FileQuery)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"not a query of files: {error}") from error
        handlers: Mapping[str, Callable[[FileQuery, ResponseWriter], Awaitable[None]]] = {
            "manifest": self._send_manifest,
            "follow": self._follow,
            "piece": self._send_piece,
            "file": self._send_file,
        }
        await handlers[query.kind](query, outgoing)

    async def _send_manifest(self, query: FileQuery, outgoing: ResponseWriter) -> None:
        offer = self.models.get(query.key)
        if offer is None:
            offer = await self._clock.offload(self._open_model, query.key)
            if offer is None:
                raise NotFound(f"this process has nothing of {query.key}")
            self.models[query.key] = offer
        outgoing.send(encode_manifest(offer.manifest))

    async def _follow(self, query: FileQuery, outgoing: ResponseWriter) -> None:
        offer = self._find(query)
        sent = 0
        self.followers += 1
        try:
            while True:
                if part := bytes(offer.entries[sent:]):
                    sent += len(part)
                    if not outgoing.send(part):
                        return
                if offer.is_whole:
                    return
                await offer.changed.wait()
        finally:
            self.followers -= 1

    async def _send_piece(self, query: FileQuery, outgoing: ResponseWriter) -> None:
        offer = self._find(query)
        if query.number not in offer.numbers:
            raise NotFound(f"this process has not piece {query.number} of {query.key}")
        if self._uploads >= MAX_UPLOADS:
            raise Overloaded("this process sends pieces to others")
        self._uploads += 1
        try:
            try:
                # a model that is whole meanwhile is read at its new place
                content = await self._clock.offload(lambda: offer.read(query.number))
            except OSError as error:
                raise NotFound(f"{query.key} cannot be read: {error.strerror}") from error
            await self._send(content, outgoing)
        finally:
            self._uploads -= 1

    async def _send_file(self, query: FileQuery, outgoing: ResponseWriter) -> None:
        path = self.files.get(query.sha256)
        if path is None:
            raise NotFound("this process serves no file with that hash")
        await self._send(await self._clock.offload(path.read_bytes), outgoing)

    async def _send(self, content: bytes, outgoing: ResponseWriter) -> None:
        view = memoryview(content)
        for start in range(0, len(view), CHUNK_BYTES):
            await outgoing.wait_for_window()
            if not outgoing.send(view[start : start + CHUNK_BYTES]):
                return
            self.sent_bytes += min(CHUNK_BYTES, len(view) - start)
            await asyncio.sleep(0)  # other streams have their turn behind each part

    def _find(self, query: FileQuery) -> OfferedModel:
        offer = self.models.get(query.key)
        if offer is None or offer.manifest.commit != query.commit:
            raise NotFound(f"this process has not {query.key} at {query.commit[:12]}")
        return offer
