"""The `files` endpoint: a model's small files by content hash, for frontends on other hosts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dynamo.communication.requests import ResponseWriter
from dynamo.core.clock import Clock
from dynamo.core.errors import NotFound

FILE_CHUNK_BYTES = 256 << 10


class ModelFileServer:
    """Answers a call whose payload is a sha256 in hex with the file's bytes, in order, no faster
    than the caller's window allows."""

    def __init__(self, files: Mapping[str, Path], clock: Clock) -> None:
        self._files = files
        self._clock = clock

    async def handle(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """A handler of the request plane. Raises `NotFound` for a hash that is not served."""
        path = self._files.get(payload.decode("ascii", "replace"))
        if path is None:
            raise NotFound("no file of that hash is served here")
        file = await self._clock.offload(path.open, "rb")
        try:
            while chunk := await self._clock.offload(file.read, FILE_CHUNK_BYTES):
                await outgoing.wait_for_window()
                if not outgoing.send(chunk):
                    return
        finally:
            file.close()
