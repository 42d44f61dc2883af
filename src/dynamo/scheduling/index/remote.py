"""Asking an index in another process: `dynamo indexer`, which several routers share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError
from dynamo.core.hashing import pack_hashes
from dynamo.runtime.client import Client
from dynamo.scheduling.index.cache_view import CacheView, Mode

log = logging.getLogger(__name__)

INDEXER: Final = "indexer"
MATCH: Final = "match"
MODES: Final = "modes"

ANSWER_S: Final = 0.05
"""A router waits so long for the index; then its predictions must do."""

MODES_EVERY_S: Final = 0.5

encode = msgspec.msgpack.Encoder().encode
_decode_overlaps = msgspec.msgpack.Decoder(dict[str, int]).decode
_decode_modes = msgspec.msgpack.Decoder(dict[str, Mode]).decode


class RemoteIndex:
    """The other end of `dynamo indexer`: `match` for a prompt, `follow` for how far its view of
    each worker can be trusted."""

    def __init__(self, match: Client, modes: Client, clock: Clock) -> None:
        self._match = match
        self._modes = modes
        self._clock = clock
        self.asked = 0
        self.unanswered = 0

    async def match(self, hashes: Sequence[int]) -> Mapping[str, int]:
        """worker -> blocks that it holds. Empty where no indexer answers in time."""
        self.asked += 1
        try:
            return _decode_overlaps(await self._ask(self._match, pack_hashes(hashes)))
        except (DynamoError, OSError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
            self.unanswered += 1
            return {}

    async def follow(self, view: CacheView) -> None:
        """Keep the modes of `view` those of the indexer; while it is away, all are approximate."""
        away = False
        while True:
            try:
                view.trust(_decode_modes(await self._ask(self._modes, b"")))
                away = False
            except (
                DynamoError,
                OSError,
                TimeoutError,
                msgspec.DecodeError,
                UnicodeDecodeError,
            ) as error:
                view.trust({})
                if not away:
                    log.warning("no indexer answers", extra={"fields": {"error": str(error)}})
                away = True
            await self._clock.sleep(MODES_EVERY_S)

    async def _ask(self, client: Client, payload: bytes) -> bytes:
        answer = bytearray()

        def take(part: bytes) -> bool:
            answer.extend(part)
            return True

        async with asyncio.timeout(ANSWER_S if client is self._match else MODES_EVERY_S):
            await client.call(client.pick("round_robin"), payload, Context("index"), take)
        return bytes(answer)
