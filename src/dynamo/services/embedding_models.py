"""Embedding models that workers announce: found by their cards and added to a gateway."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import NamedTuple

import msgspec

from dynamo.application import Gateway
from dynamo.application.gateway import MODELS_HEALTH_KEY, ServedEmbeddingModel
from dynamo.core.clock import Clock
from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelUnavailable,
    ProtocolError,
)
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.models.embedding_model import (
    EMBED_ENDPOINT,
    EMBEDDING_COMPONENT,
    EmbeddingCard,
    EmbedRequest,
    embedding_models_prefix,
)
from dynamo.models.file_cache import FileRef, find_file
from dynamo.models.tokenization.encoders import Encoder, ReferenceEncoder
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.sdk.handle import call_with_retries
from dynamo.services.catalogue import CardKind, Catalogue
from dynamo.services.desired_models import DesiredModels, ModelState
from dynamo.services.model_store.store import ensure_file
from dynamo.services.model_uses import ModelUses, close_removed_model
from dynamo.services.model_watcher import TakeRequests
from dynamo.telemetry.story import current_story

log = logging.getLogger(__name__)

VECTOR_BYTES = 4
"""Bytes of an element of a vector."""
TEXTS_PER_SLICE = 64
"""So many texts are encoded at a time, so that others get their turn in the threads."""
MAX_CHARS_PER_TOKEN = 128
"""A text with more characters for each token of the context is not encoded to count its tokens."""


def choose_embedding_card(
    cards: Collection[EmbeddingCard], opened: EmbeddingCard | None
) -> EmbeddingCard | None:
    """Return the newest card when a first worker announces a model, and again when no worker has
    the model that was opened."""
    if opened and any(opened.is_same_model(card) for card in cards):
        return None
    return max(cards, key=lambda card: card.created)


EMBEDDING_MODELS = CardKind(
    embedding_models_prefix, msgspec.json.Decoder(EmbeddingCard).decode, choose_embedding_card
)


class EmbeddingModelWatcher:
    """Follows the embedding models that workers announce and adds them to a gateway.

    A model stays while its workers are away; calls wait for a worker and then fail. It goes when it
    was removed. `take_requests` is that of `ModelWatcher`.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        gateway: Gateway,
        desired: DesiredModels,
        uses: ModelUses,
    ) -> None:
        self._runtime = runtime
        self._desired = desired
        self._uses = uses
        self._gateway = gateway
        self._catalogue = Catalogue(
            runtime, desired, EMBEDDING_MODELS, self._open, self._close, gateway.set_pending
        )
        self._clients: dict[str, Client] = {}
        self.take_requests: TakeRequests = lambda _: lambda: 0

    def start(self) -> None:
        """Follow the models until the runtime shuts down."""
        self._runtime.tasks.start(self._catalogue.run(), "embedding models")

    def states(self) -> Mapping[str, ModelState]:
        """Return the state of each embedding model that was announced."""
        return {
            name: ModelState("loaded") if client.instances else self._desired.state(name)
            for name, client in self._clients.items()
        }

    def _close(self, name: str) -> None:
        client = self._clients.pop(name)
        self._gateway.remove(name)

        requests = self.take_requests(name)
        removal = close_removed_model(self._runtime, name, requests, client.close)
        self._runtime.tasks.start(removal, f"remove {name}")

    async def _open(self, card: EmbeddingCard) -> None:
        runtime = self._runtime
        component = runtime.namespace().component(EMBEDDING_COMPONENT)
        file = await ensure_file(runtime, card.tokenizer)
        encoder = await runtime.clock.offload(_open_encoder, file)

        expected = {
            "model": card.names[0],
            "dimensions": card.dimensions,
            "tokenizer": card.tokenizer.sha256,
            "weights": card.weights,
        }

        def accepts(instance: Instance) -> bool:
            return expected.items() <= instance.capabilities.items()

        client = await component.endpoint(EMBED_ENDPOINT).client(accepts)
        name = card.names[0]
        previous = self._clients.get(name)
        self._clients[name] = client

        def hold(timeout_s: float | None) -> AbstractAsyncContextManager[None]:
            if name not in self._desired.loads:
                return nullcontext()
            return self._uses.hold(name, timeout_s, lambda: bool(client.instances))

        processor = EmbeddingProcessor(card, encoder, client, runtime.clock, hold)
        served = ServedEmbeddingModel(
            card.names, processor, card.created, card.context_tokens, card.dimensions
        )
        self._gateway.add_embedding_model(served)
        runtime.health.set_healthy(MODELS_HEALTH_KEY)
        log.info("embedding model ready", extra={"fields": {"model": card.names[0]}})
        if previous is not None:
            await previous.close()


def _open_encoder(file: FileRef) -> Encoder:
    path = find_file(file)
    if path is None:
        raise ModelUnavailable(f"{file.name} is not on this host")
    return ReferenceEncoder(path)


class Embeddings(NamedTuple):
    """`vectors`: float32 in little-endian order, one for each text; `tokens`: of all texts."""

    vectors: list[memoryview]
    tokens: int


class EmbeddingProcessor:
    """Computes embeddings of one model: encodes texts here and calls the workers. `hold` waits for
    a worker of a model that is on demand."""

    def __init__(
        self,
        card: EmbeddingCard,
        encoder: Encoder,
        client: Client,
        clock: Clock,
        hold: Callable[[float | None], AbstractAsyncContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._hold = hold
        self._card = card
        self._encoder = encoder
        self._client = client
        self._clock = clock

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        context: Context,
        *,
        dimensions: int = 0,
        truncate_tokens: int = 0,
        param: str = "input",
    ) -> Embeddings:
        """Return the vectors of texts, or of lists of token ids, in their order.

        `dimensions`: elements of a vector; 0: all. `truncate_tokens`: inputs are cut to so many
        tokens; 0: a longer one than the context is refused. Raises `InvalidRequest`,
        `ContextLengthExceeded`, and the errors of the workers. `param` names the inputs there.
        """
        packed: list[bytes] = []
        for start in range(0, len(inputs), TEXTS_PER_SLICE):
            part = inputs[start : start + TEXTS_PER_SLICE]
            packed += await self._clock.offload(self._encode, part, start, truncate_tokens, param)
        tokens = sum(map(len, packed)) // TOKEN_BYTES
        if (story := current_story.get()) is not None:
            story.admitting_s, story.prompt_tokens = self._clock.now(), tokens
        width = (dimensions or self._card.dimensions) * VECTOR_BYTES
        parts: list[bytes] = []

        def sink(payload: bytes) -> bool:
            parts.append(payload)
            return True

        payload = msgspec.msgpack.encode(EmbedRequest(packed, dimensions))
        async with self._hold(context.timeout_s):
            await call_with_retries(self._client, payload, context, sink)
        data = memoryview(b"".join(parts))
        if len(data) != width * len(packed):
            raise ProtocolError(f"{len(data)} bytes instead of {width * len(packed)} came back")
        vectors = [data[start : start + width] for start in range(0, len(data), width)]
        return Embeddings(vectors, tokens)

    def _encode(
        self, inputs: Sequence[str | Sequence[int]], first: int, truncate_tokens: int, param: str
    ) -> list[bytes]:
        """Return the packed ids of each input; the number of the first one is `first`."""
        limit = self._card.context_tokens
        most_chars = limit * MAX_CHARS_PER_TOKEN
        packed = []
        for number, text in enumerate(inputs, first):
            if isinstance(text, str):
                if len(text) > most_chars and not truncate_tokens:
                    raise self._too_long(f"{param}[{number}] has {len(text)} characters", param)
                ids = self._encoder.encode_with_special_tokens(text[:most_chars])
            else:
                ids = self._pack(text, f"{param}[{number}]")
            if truncate_tokens:
                ids = _truncate(ids, min(limit, truncate_tokens))
            if len(ids) > limit * TOKEN_BYTES:
                tokens = len(ids) // TOKEN_BYTES
                raise self._too_long(f"{param}[{number}] has {tokens} tokens", param)
            packed.append(ids)
        return packed

    def _too_long(self, what: str, param: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"{what}; the limit of {self._card.names[0]} is {self._card.context_tokens} tokens",
            hint='split the text, or send "truncate_prompt_tokens": -1 to cut it',
            param=param,
        )

    def _pack(self, ids: Sequence[int], param: str) -> bytes:
        if max(ids) >= self._card.vocab_size:
            raise InvalidRequest(
                f"token id {max(ids)} is not in the vocabulary of {self._card.vocab_size}",
                param=param,
            )
        return pack_ids(ids)


def _truncate(ids: bytes, tokens: int) -> bytes:
    """Return the first tokens and the last one, which ends a text."""
    if len(ids) <= tokens * TOKEN_BYTES:
        return ids
    return ids[: (tokens - 1) * TOKEN_BYTES] + ids[-TOKEN_BYTES:]
