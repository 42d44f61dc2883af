"""The routes /v1/embeddings (OpenAI), /v1/score (vLLM) and /v1/rerank (Cohere, Jina)."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import hypot
from operator import mul
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from dynamo.application.exchange import Exchange
from dynamo.application.gateway import Gateway, ServedEmbeddingModel
from dynamo.application.generation.handler import GenerationHandler
from dynamo.application.openai.body import decode_body
from dynamo.core.context import Context
from dynamo.core.errors import InvalidRequest

MAX_INPUTS = 2048
VECTORS_PER_SLICE = 32
"""So many vectors are written or compared in one iteration of the event loop, in about 1 ms."""
WHOLE_CONTEXT = -1
"""The value of `truncate_prompt_tokens` that cuts texts to the model's context."""

TruncateTokens = Annotated[int, Meta(ge=WHOLE_CONTEXT)]


class EmbeddingBody(msgspec.Struct):
    """The body of /v1/embeddings. `input`: a text, texts, token ids, or lists of those."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncate_prompt_tokens: TruncateTokens | None = None


class ScoreBody(msgspec.Struct):
    """The body of /v1/score: one text or as many as `text_2` has."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    truncate_prompt_tokens: TruncateTokens | None = None


class RerankBody(msgspec.Struct):
    """The body of /v1/rerank. A document is a text, or an object with `text`."""

    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: TruncateTokens | None = None


_embedding_decoder = msgspec.json.Decoder(EmbeddingBody)
_score_decoder = msgspec.json.Decoder(ScoreBody)
_rerank_decoder = msgspec.json.Decoder(RerankBody)


class EmbeddingHandler:
    """Answers with the vectors of texts, or with the cosines between them.

    Requests have the slots and deadlines of those that generate text.
    """

    def __init__(self, gateway: Gateway, generation: GenerationHandler) -> None:
        self._gateway = gateway
        self._generation = generation

    @asynccontextmanager
    async def _open(
        self, exchange: Exchange, served: ServedEmbeddingModel
    ) -> AsyncIterator[Context]:
        """Yield the context of a request, and tell its story at the end."""
        generation = self._generation
        with generation.hold_story(exchange, begins=True):
            async with generation.open_context(exchange, served.names[0]) as context:
                yield context

    async def embed(self, exchange: Exchange) -> None:
        """POST /v1/embeddings."""
        body = decode_body(_embedding_decoder, exchange.request)
        exchange.model, served = self._gateway.find_embedding_model(body.model)
        async with self._open(exchange, served) as context:
            _check_dimensions(body.dimensions, served)
            vectors, tokens = await served.processor.embed(
                _read_inputs(body.input),
                context,
                dimensions=body.dimensions or 0,
                truncate_tokens=_truncation(body, served),
            )
            data = await _write_vectors(vectors, body.encoding_format or "float")
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            answer = {"object": "list", "data": data, "model": exchange.model, "usage": usage}
            exchange.send_value(answer)

    async def score(self, exchange: Exchange) -> None:
        """POST /v1/score: the cosine of each pair."""
        body = decode_body(_score_decoder, exchange.request)
        exchange.model, served = self._gateway.find_embedding_model(body.model)
        async with self._open(exchange, served) as context:
            first = _check_texts(body.text_1, "text_1")
            second = _check_texts(body.text_2, "text_2")
            if len(first) not in (1, len(second)):
                raise InvalidRequest(
                    f"text_1 has {len(first)} texts and text_2 {len(second)}",
                    hint="send one text in text_1, or as many as in text_2",
                    param="text_1",
                )
            cosines, tokens = await self._compare(context, served, first, second, body)
            answer = {
                "id": f"score-{exchange.request_id}",
                "object": "list",
                "created": served.created,
                "model": exchange.model,
                "data": [
                    {"index": number, "object": "score", "score": cosine}
                    for number, cosine in enumerate(cosines)
                ],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
            exchange.send_value(answer)

    async def rerank(self, exchange: Exchange) -> None:
        """POST /v1/rerank: the documents that are nearest to the query first."""
        body = decode_body(_rerank_decoder, exchange.request)
        exchange.model, served = self._gateway.find_embedding_model(body.model)
        async with self._open(exchange, served) as context:
            query = _check_texts(body.query, "query")
            texts = _check_texts([_text_of(item) for item in body.documents], "documents")
            cosines, tokens = await self._compare(context, served, query, texts, body)
            order = sorted(range(len(texts)), key=lambda number: -cosines[number])
            results: list[dict[str, Any]] = [
                {"index": number, "relevance_score": cosines[number]}
                for number in order[: body.top_n]
            ]
            if body.return_documents is not False:
                for result in results:
                    result["document"] = {"text": texts[result["index"]]}
            answer = {
                "id": f"rerank-{exchange.request_id}",
                "model": exchange.model,
                "results": results,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
            exchange.send_value(answer)

    async def _compare(
        self,
        context: Context,
        served: ServedEmbeddingModel,
        first: Sequence[str],
        second: Sequence[str],
        body: ScoreBody | RerankBody,
    ) -> tuple[list[float], int]:
        """Return the cosine of each text of `second` with its text of `first`, and the tokens."""
        vectors, tokens = await served.processor.embed(
            [*first, *second],
            context,
            truncate_tokens=_truncation(body, served),
        )
        left = vectors[: len(first)] if len(first) > 1 else vectors[:1] * len(second)
        cosines = []
        for number, pair in enumerate(zip(left, vectors[len(first) :], strict=True)):
            cosines.append(_cosine(*(vector.cast("f").tolist() for vector in pair)))
            if number % VECTORS_PER_SLICE == VECTORS_PER_SLICE - 1:
                await asyncio.sleep(0)
        return cosines, tokens


def _text_of(document: str | dict[str, Any]) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise InvalidRequest("an object without text", field="documents")
    return text


def _read_inputs(value: str | list[Any]) -> list[str] | list[list[int]]:
    """Return texts or lists of token ids. Raises `InvalidRequest` for anything else."""
    items = [value] if isinstance(value, str) else value
    if items and all(type(item) is int for item in items):
        items = [items]
    if items and all(isinstance(item, list) for item in items):
        _check_count(len(items), "input")
        for number, ids in enumerate(items):
            if not ids or not all(type(token) is int and token >= 0 for token in ids):
                raise InvalidRequest(
                    "expected token ids, at least one", field=f"input[{number}]", param="input"
                )
        return cast("list[list[int]]", items)
    return _check_texts(items, "input")


def _check_texts(texts: str | Sequence[Any], param: str) -> list[str]:
    texts = [texts] if isinstance(texts, str) else texts
    _check_count(len(texts), param)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidRequest(
                f"expected a text, got {type(text).__name__}",
                hint="all inputs are texts, or all are lists of token ids",
                field=f"{param}[{number}]",
                param=param,
            )
        if not text:
            raise InvalidRequest("the text is empty", field=f"{param}[{number}]", param=param)
    return list(texts)


def _check_count(count: int, param: str) -> None:
    if not 0 < count <= MAX_INPUTS:
        raise InvalidRequest(
            f"{count} inputs, 1 to {MAX_INPUTS} are possible",
            hint="send several requests" if count else "",
            field=param,
        )


def _check_dimensions(dimensions: int | None, served: ServedEmbeddingModel) -> None:
    if dimensions is not None and dimensions > served.dimensions:
        raise InvalidRequest(
            f"{dimensions} are more than {served.dimensions}, those of {served.names[0]}",
            field="dimensions",
        )


def _truncation(body: EmbeddingBody | ScoreBody | RerankBody, served: ServedEmbeddingModel) -> int:
    """Return the tokens to which texts are cut; 0: they are not cut."""
    tokens = body.truncate_prompt_tokens
    if not tokens:
        return 0
    return served.context_tokens if tokens == WHOLE_CONTEXT else tokens


async def _write_vectors(vectors: Sequence[memoryview], encoding: str) -> list[msgspec.Raw]:
    """Return OpenAI's embedding objects, encoded in slices, since floats take long to write."""
    written = []
    for number, vector in enumerate(vectors):
        embedding: Any = vector.cast("f").tolist() if encoding == "float" else b64encode(vector)
        if encoding == "base64":
            embedding = embedding.decode()
        item = {"object": "embedding", "index": number, "embedding": embedding}
        written.append(msgspec.Raw(msgspec.json.encode(item)))
        if number % VECTORS_PER_SLICE == VECTORS_PER_SLICE - 1:
            await asyncio.sleep(0)
    return written


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    length = hypot(*first) * hypot(*second)
    return sum(map(mul, first, second)) / length if length else 0.0
