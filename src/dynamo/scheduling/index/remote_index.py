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
from dynamo.runtime.calls.client import Client
from dynamo.scheduling.index.cache_view import CacheView, CacheViewMode

log = logging.getLogger(__name__)

INDEXER_COMPONENT: Final = "indexer"
MATCH_ENDPOINT: Final = "match"
MODES_ENDPOINT: Final = "modes"

MATCH_TIMEOUT_S: Final = 0.05
"""A router waits so long for the index; then its predictions must do."""

MODES_POLL_INTERVAL_S: Final = 0.5

encode_indexer_reply = msgspec.msgpack.Encoder().encode
_decode_overlaps = msgspec.msgpack.Decoder(dict[str, int]).decode
_decode_modes = msgspec.msgpack.Decoder(dict[str, CacheViewMode]).decode


class RemoteIndex:
    """The other end of `dynamo indexer`: `match` for a prompt, `follow` for how far its view of
    each worker can be trusted."""

    def __init__(self, match: Client, modes: Client, clock: Clock) -> None:
        self._match_client = match
        self._modes_client = modes
        self._clock = clock
        self.query_count = 0
        self.failed_query_count = 0

    async def match(self, hashes: Sequence[int]) -> Mapping[str, int]:
        """worker -> blocks that it holds. Empty where no indexer answers in time."""
        self.query_count += 1
        try:
            return _decode_overlaps(await self._query(self._match_client, pack_hashes(hashes)))
        except (DynamoError, OSError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
            self.failed_query_count += 1
            return {}

    async def poll_modes(self, view: CacheView) -> None:
        """Keep the modes of `view` those of the indexer; while it is away, all are approximate."""
        away = False
        while True:
            try:
                view.set_modes(_decode_modes(await self._query(self._modes_client, b"")))
                away = False
            except (
                DynamoError,
                OSError,
                TimeoutError,
                msgspec.DecodeError,
                UnicodeDecodeError,
            ) as error:
                view.set_modes({})
                if not away:
                    log.warning("no indexer answers", extra={"fields": {"error": str(error)}})
                away = True
            await self._clock.sleep(MODES_POLL_INTERVAL_S)

    async def _query(self, client: Client, payload: bytes) -> bytes:
        answer = bytearray()

        def take(part: bytes) -> bool:
            answer.extend(part)
            return True

        async with asyncio.timeout(
            MATCH_TIMEOUT_S if client is self._match_client else MODES_POLL_INTERVAL_S
        ):
            await client.call(client.pick("round_robin"), payload, Context("index"), take)
        return bytes(answer)
