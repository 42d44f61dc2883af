"""A worker that serves an embedding model: its endpoint `embed` and its card."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from dynamo.core.codec import unpack_ids
from dynamo.core.errors import (
    DECODE_ERRORS,
    ContextLengthExceeded,
    InvalidRequest,
    ProtocolError,
    WorkerFailed,
)
from dynamo.core.tasks import run_all
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
    from dynamo.models.checkpoint.quantization import Floats
    from dynamo.runtime.component import ServedEndpoint
    from dynamo.runtime.distributed import DistributedRuntime


STEP_TOKENS = 2048
"""At most so many tokens a thread and step, which take a tenth of a second of a small model."""
TEXTS_PER_TURN = 16
"""A request gets this many texts into a step before the next request's turn."""

TokenIds = Sequence[int]


class _Request:
    """The texts of one request. `next_text` is the first that is in no step yet."""

    def __init__(self, texts: Sequence[TokenIds]) -> None:
        self.texts = texts
        self.vectors: list[Floats | None] = [None] * len(texts)
        self.next_text = 0
        self.missing = len(texts)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class EmbeddingBatcher:
    """Texts wait in the order of their requests, which take turns. `threads` compute a step by
    `encode`, which returns one vector for each text.

    `waiting`: the requests with texts that are in no step yet.
    """

    def __init__(self, encode: Callable[[Sequence[TokenIds]], Floats], threads: int) -> None:
        self._encode = encode
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, "embedding")
        self.waiting: deque[_Request] = deque()
        self._open: set[_Request] = set()
        self._work = asyncio.Event()
        self.steps = 0
        self.texts = 0
        self.tokens = 0

    async def embed(self, texts: Sequence[TokenIds]) -> list[Floats]:
        """Return the vectors of `texts`, none of which is empty. Cancellation drops those that
        wait. Raises `WorkerFailed` if the encoder fails.
        """
        request = _Request(texts)
        self._open.add(request)
        self.waiting.append(request)
        self._work.set()
        try:
            await request.done
        finally:
            self._open.discard(request)
            if request in self.waiting:
                self.waiting.remove(request)
        return [vector for vector in request.vectors if vector is not None]

    async def run(self) -> None:
        """Compute steps until cancelled."""
        while True:
            await self._work.wait()
            while self.waiting:
                await self._compute_step(self._plan_step())
            self._work.clear()

    def close(self) -> None:
        """Fail all requests and stop the threads after their step."""
        for request in self._open:
            if not request.done.done():
                request.done.set_exception(WorkerFailed("the worker was stopped"))
        self.waiting.clear()
        self._executor.shutdown(wait=False)

    def _plan_step(self) -> list[tuple[_Request, int]]:
        """Take texts until the step is full. Every request in turn gives some of them."""
        step: list[tuple[_Request, int]] = []
        room = STEP_TOKENS * self._threads
        while self.waiting:
            request = self.waiting.popleft()
            for number in range(
                request.next_text, min(request.next_text + TEXTS_PER_TURN, len(request.texts))
            ):
                length = len(request.texts[number])
                if step and length > room:
                    self.waiting.appendleft(request)
                    return step
                step.append((request, number))
                room -= length
                request.next_text = number + 1
            if request.next_text < len(request.texts):
                self.waiting.append(request)
        return step

    async def _compute_step(self, step: Sequence[tuple[_Request, int]]) -> None:
        await run_all(*(self._compute_part(part) for part in _split_evenly(step, self._threads)))
        self.steps += 1

    async def _compute_part(self, part: Sequence[tuple[_Request, int]]) -> None:
        texts = [request.texts[number] for request, number in part]
        loop = asyncio.get_running_loop()
        try:
            vectors = await loop.run_in_executor(self._executor, self._encode, texts)
        except Exception as error:  # noqa: BLE001 - the next step may succeed
            for request, _ in part:
                self._fail(request, error)
            return
        for (request, number), vector in zip(part, vectors, strict=True):
            self._deliver(request, number, vector)

    def _deliver(self, request: _Request, number: int, vector: Floats) -> None:
        request.vectors[number] = vector
        request.missing -= 1
        self.texts += 1
        self.tokens += len(request.texts[number])
        if not request.missing and not request.done.done():
            request.done.set_result(None)

    def _fail(self, request: _Request, error: Exception) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        if not request.done.done():
            request.done.set_exception(WorkerFailed(f"the encoder failed: {error}"))


def _split_evenly(
    step: Sequence[tuple[_Request, int]], parts: int
) -> Iterator[list[tuple[_Request, int]]]:
    """Yield at most `parts` parts with about equally many tokens. Texts of similar length stay
    together, so that they are computed together."""
    ordered = sorted(step, key=lambda item: len(item[0].texts[item[1]]))
    total = sum(len(request.texts[number]) for request, number in ordered)
    part: list[tuple[_Request, int]] = []
    tokens = 0
    for request, number in ordered:
        part.append((request, number))
        tokens += len(request.texts[number])
        if tokens * parts >= total:
            yield part
            part, tokens = [], 0
    if part:
        yield part


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
