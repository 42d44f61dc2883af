"""A worker that serves an embedding model: its endpoint `embed` and its card."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from dynamo.core.codec import unpack_ids
from dynamo.core.errors import DECODE_ERRORS, ContextLengthExceeded, InvalidRequest, ProtocolError
from dynamo.core.tasks import run_all
from dynamo.inference.embedding.batcher import EmbeddingBatcher
from dynamo.models.embedding_model import (
    EMBED_ENDPOINT,
    EMBEDDING_COMPONENT,
    EmbeddingCard,
    EmbeddingModel,
    EmbedRequest,
    embedding_models_prefix,
)
from dynamo.runtime.supervisors import SUPERVISOR_KEY

if TYPE_CHECKING:
    from dynamo.communication.requests import ResponseWriter
    from dynamo.inference.embedding.bert import BertEncoder
    from dynamo.runtime.component import ServedEndpoint
    from dynamo.runtime.distributed import DistributedRuntime


ANSWER_CHUNK_BYTES = 256 << 10


class EmbeddingServer:
    """Serves one embedding model. Call `attach` once, then `close` or end the process."""

    def __init__(self, folder: Path, model: EmbeddingModel, card: EmbeddingCard) -> None:
        self._folder = folder
        self._model = model
        self._card = card
        self._endpoints: list[ServedEndpoint] = []

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Load the weights, serve the endpoints and announce the card. Raises
        `ModelUnavailable`."""
        self._runtime, card = runtime, self._card
        encoder = await runtime.clock.offload(load_encoder, self._folder, self._model)
        self._batcher = batcher = EmbeddingBatcher(encoder.encode, len(os.sched_getaffinity(0)))
        runtime.tasks.start(batcher.run(), "embedding steps")
        self._declare_metrics()
        component = runtime.namespace().component(EMBEDDING_COMPONENT)
        capabilities = {
            "model": card.names[0],
            "dimensions": card.dimensions,
            "tokenizer": card.tokenizer.sha256,
            "weights": card.weights,
            SUPERVISOR_KEY: runtime.supervisor,
        }
        embed = component.endpoint(EMBED_ENDPOINT)
        self._endpoints.append(await embed.serve(self._embed, capabilities=capabilities))
        await runtime.discovery.put(self._discovery_key(), msgspec.json.encode(card))

    async def close(self, drain_s: float = 0.0) -> None:
        """Leave discovery, finish requests within `drain_s`, and stop."""
        await self._runtime.discovery.delete(self._discovery_key())
        await run_all(*(served.withdraw(drain_s) for served in self._endpoints))
        self._batcher.close()

    async def _embed(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Answer an `EmbedRequest` with its vectors: float32, little-endian, in any parts."""
        from dynamo.inference.embedding.bert import cut_vectors

        try:
            request = msgspec.msgpack.decode(payload, type=EmbedRequest)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"not an embed request: {error}") from error
        texts = await self._runtime.clock.offload(self._read_texts, request.texts)
        vectors = await self._batcher.embed(texts)
        data = memoryview(cut_vectors(vectors, request.dimensions or self._card.dimensions))
        for start in range(0, len(data), ANSWER_CHUNK_BYTES):
            await outgoing.wait_for_window()
            if not outgoing.send(bytes(data[start : start + ANSWER_CHUNK_BYTES])):
                return

    def _read_texts(self, packed: Sequence[bytes]) -> list[tuple[int, ...]]:
        texts = [unpack_ids(ids) for ids in packed]
        for ids in texts:
            self._check(ids)
        return texts

    def _check(self, ids: tuple[int, ...]) -> None:
        limit = self._card.context_tokens
        if not ids or max(ids) >= self._card.vocab_size:
            raise InvalidRequest("an input is empty, or has ids that the model does not know")
        if len(ids) > limit:
            raise ContextLengthExceeded(f"an input has {len(ids)} tokens; the limit is {limit}")

    def _declare_metrics(self) -> None:
        registry, batcher = self._runtime.metrics, self._batcher
        registry.gauge(
            "dynamo_embedding_waiting_requests",
            "Requests with texts that no step has taken yet.",
            callback=lambda: len(batcher.waiting),
        )
        counter = registry.counter
        counter("dynamo_embedding_texts_total", "Texts embedded.", callback=lambda: batcher.texts)
        counter(
            "dynamo_embedding_tokens_total",
            "Tokens of the embedded texts.",
            callback=lambda: batcher.tokens,
        )
        counter("dynamo_embedding_steps_total", "Steps computed.", callback=lambda: batcher.steps)

    def _discovery_key(self) -> str:
        prefix = embedding_models_prefix(self._runtime.settings.runtime.namespace)
        return f"{prefix}{quote(self._card.names[0], safe='')}/{self._runtime.instance_id}"


def load_encoder(folder: Path, model: EmbeddingModel) -> BertEncoder:
    """Read the weights of a folder. Each thread computes alone. Raises `ModelUnavailable`."""
    from dynamo.inference.embedding.bert import BertEncoder
    from dynamo.inference.native.blas import set_blas_threads
    from dynamo.models.checkpoint.safetensors import SafetensorsFolder

    set_blas_threads(1)
    weights = SafetensorsFolder(folder)
    try:
        return BertEncoder(weights, model)
    finally:
        weights.close()
