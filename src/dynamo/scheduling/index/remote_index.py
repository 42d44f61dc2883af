"""Queries to the index of a `dynamo indexer`, which several routers share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import DECODE_ERRORS, DynamoError
from dynamo.core.hashing import pack_hashes
from dynamo.runtime.calls.client import Client
from dynamo.scheduling.index.cache_view import CacheView, CacheViewMode, IndexMatch

log = logging.getLogger(__name__)

INDEXER_COMPONENT: Final = "indexer"
MATCH_ENDPOINT: Final = "match"
MODES_ENDPOINT: Final = "modes"
MODEL_KEY: Final = "model"
"""The key in a query's metadata that names the model; without it, all are meant."""

MATCH_TIMEOUT_S: Final = 0.05
"""A router waits this long for an answer and then relies on its predictions."""

MODES_POLL_INTERVAL_S: Final = 0.5
QUERY_ERRORS: Final = (DynamoError, OSError, *DECODE_ERRORS)

encode_indexer_reply = msgspec.msgpack.Encoder().encode
_decode_match = msgspec.msgpack.Decoder(IndexMatch).decode
_decode_modes = msgspec.msgpack.Decoder(dict[str, CacheViewMode]).decode


class RemoteIndex:
    """The client of an indexer for the workers of `model`, or of all. `match` looks a prompt up;
    `poll_modes` follows its view modes."""

    def __init__(self, match: Client, modes: Client, clock: Clock, model: str = "") -> None:
        self._context = Context("index", metadata={MODEL_KEY: model} if model else {})
        self._match_client = match
        self._modes_client = modes
        self._clock = clock

    async def match(self, hashes: Sequence[int]) -> IndexMatch:
        """Return what the index knows of a prompt. Empty when no indexer answers in time."""
        try:
            return _decode_match(await self._query(self._match_client, pack_hashes(hashes)))
        except QUERY_ERRORS:
            return IndexMatch()

    async def poll_modes(self, view: CacheView) -> None:
        """Copy the indexer's modes to `view` forever. Without an answer all are approximate."""
        away = False
        while True:
            try:
                view.set_modes(_decode_modes(await self._query(self._modes_client, b"")))
                away = False
            except QUERY_ERRORS as error:
                view.set_modes({})
                if not away:
                    log.warning("no indexer answers", extra={"fields": {"error": str(error)}})
                away = True
            await self._clock.sleep(MODES_POLL_INTERVAL_S)

    async def _query(self, client: Client, payload: bytes) -> bytes:
        timeout_s = MODES_POLL_INTERVAL_S if client is self._modes_client else MATCH_TIMEOUT_S
        async with asyncio.timeout(timeout_s):
            instance = client.pick("round_robin")
            return b"".join(await client.collect(instance, payload, self._context))
