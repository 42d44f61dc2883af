"""/v1/embeddings, /v1/score and /v1/rerank over a processor whose vectors are known."""

from __future__ import annotations

import asyncio
import struct
from base64 import b64decode
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from tests.unit.application.test_routes_api import get

from dynamo.application.gateway import ServedEmbeddingModel
from dynamo.core.context import Context

VECTORS = {"east": (1.0, 0.0, 0.5), "north": (0.0, 1.0, 0.25), "up": (0.5, 0.5, 0.125)}


class Answer(NamedTuple):
    vectors: list[memoryview]
    tokens: int


class DirectionProcessor:
    """The vector of a text is that of its first word; other texts have that of "up"."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    async def embed(self, inputs: Sequence[Any], context: Context, **options: Any) -> Answer:
        self.calls.append({"inputs": inputs, **options})
        values = [VECTORS.get(str(text).split(" ")[0], VECTORS["up"]) for text in inputs]
        packed = [memoryview(struct.pack("<3f", *vector)) for vector in values]
        return Answer(packed, 2 * len(inputs))


@pytest.fixture
def directions(site: Any) -> DirectionProcessor:
    processor = DirectionProcessor()
    served = ServedEmbeddingModel(("directions", "d"), processor, 1_700_000_000, 256, 3)
    site.gateway.add_embedding_model(served)
    return processor


async def post(connect: Any, site: Any, path: str, **body: Any) -> Any:
    return await get(connect, site, path, "POST", body)


async def test_floats_and_base64_hold_the_same_vectors(
    site: Any, connect: Any, directions: DirectionProcessor
) -> None:
    body = {"model": "d", "input": ["north", "east"], "user": "ann"}
    floats = (await post(connect, site, "/v1/embeddings", **body)).json
    assert [item["embedding"] for item in floats["data"]] == [[0.0, 1.0, 0.25], [1.0, 0.0, 0.5]]
    assert [item["index"] for item in floats["data"]] == [0, 1]
    assert (floats["object"], floats["model"]) == ("list", "d")
    assert floats["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    packed = (await post(connect, site, "/v1/embeddings", encoding_format="base64", **body)).json
    assert struct.unpack("<3f", b64decode(packed["data"][0]["embedding"])) == (0.0, 1.0, 0.25)


async def test_null_is_the_default(site: Any, connect: Any, directions: DirectionProcessor) -> None:
    nulls = {"model": None, "encoding_format": None, "dimensions": None, "user": None}
    answer = await get(connect, site, "/v1/embeddings", "POST", {"input": "east"} | nulls)
    assert answer.json["data"][0]["embedding"] == list(VECTORS["east"])
    fields = {"query": "east", "documents": ["up"], "return_documents": None, "model": None}
    answer = await get(connect, site, "/v1/rerank", "POST", fields)
    assert answer.json["results"][0]["document"] == {"text": "up"}
    assert len(directions.calls) == 2


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("one text", ["one text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
async def test_texts_and_token_ids_reach_the_model(
    site: Any, connect: Any, directions: DirectionProcessor, value: Any, inputs: Any
) -> None:
    options = {"dimensions": 2, "truncate_prompt_tokens": -1}
    answer = await post(connect, site, "/v1/embeddings", input=value, **options)
    assert answer.status == 200
    assert directions.calls == [{"inputs": inputs, "dimensions": 2, "truncate_tokens": 256}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": ""}, "input[0]: the text is empty"),
        ({"input": []}, "input: 0 inputs, 1 to 2048 are possible"),
        ({"input": ["x"] * 2049}, "input: 2049 inputs, 1 to 2048 are possible"),
        ({"input": ["x", 1]}, "input[1]: expected a text, got int"),
        ({"input": [[]]}, "input[0]: expected token ids, at least one"),
        ({"input": [[1], [-1]]}, "input[1]: expected token ids"),
        ({"input": [[True]]}, "input[0]: expected token ids"),
        ({"input": "x", "dimensions": 4}, "4 are more than 3, those of directions"),
        ({"input": "x", "dimensions": 0}, "dimensions: "),
        ({"input": "x", "encoding_format": "binary"}, "encoding_format: "),
        ({"input": "x", "model": "words"}, "'words' generates text and computes no embeddings"),
        ({"model": "d"}, "input: required, but missing"),
    ],
)
async def test_bad_input_costs_the_workers_nothing(
    site: Any, connect: Any, directions: DirectionProcessor, body: Any, message: str
) -> None:
    answer = await post(connect, site, "/v1/embeddings", **body)
    assert answer.status == 400
    assert message in answer.error["message"]
    assert answer.error["request_id"]
    assert not directions.calls


async def test_chat_of_an_embedding_model_and_unknown_models(
    site: Any, connect: Any, directions: DirectionProcessor
) -> None:
    messages = [{"role": "user", "content": "x"}]
    chat = await post(connect, site, "/v1/chat/completions", model="d", messages=messages)
    assert chat.status == 400
    assert chat.error["hint"].startswith("use /v1/embeddings")
    missing = await post(connect, site, "/v1/embeddings", model="e", input="x")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    listed = (await get(connect, site, "/v1/models")).json["data"]
    assert [model["id"] for model in listed] == ["words", "spoken", "directions", "d"]
    assert (await get(connect, site, "/v1/models/d")).json["root"] == "directions"


async def test_a_site_with_embedding_models_only_is_ready(open_site: Any, connect: Any) -> None:
    site = await open_site(empty=True)
    early = await post(connect, site, "/v1/embeddings", input="x")
    assert (early.status, early.error["code"]) == (503, "model_not_ready")
    served = ServedEmbeddingModel(("directions",), DirectionProcessor(), 1_700_000_000, 256, 3)
    site.gateway.add_embedding_model(served)
    assert (await get(connect, site, "/health")).status == 200
    chat = await post(connect, site, "/v1/completions", model="default", prompt="x")
    assert chat.status == 400
    assert "only embedding models are served here: 'directions'" in chat.error["message"]


async def test_a_slow_model_ends_at_the_timeout(
    open_site: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await open_site(request_timeout=0.05)
    processor = DirectionProcessor()
    monkeypatch.setattr(processor, "embed", lambda *_, **__: asyncio.sleep(60))
    served = ServedEmbeddingModel(("directions",), processor, 1_700_000_000, 256, 3)
    site.gateway.add_embedding_model(served)
    answer = await post(connect, site, "/v1/embeddings", input="east")
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert site.application.generation.concurrency.running == 0


async def test_names_that_a_newer_card_lacks_are_gone(
    site: Any, directions: DirectionProcessor
) -> None:
    served = ServedEmbeddingModel(("directions",), directions, 1_700_000_000, 256, 3)
    site.gateway.add_embedding_model(served)
    assert list(site.gateway.embedding_models) == ["directions"]


async def test_scores_are_cosines(site: Any, connect: Any, directions: DirectionProcessor) -> None:
    texts = {"text_1": "east", "text_2": ["east", "north"]}
    scores = (await post(connect, site, "/v1/score", **texts)).json["data"]
    expected = [1.0, 0.125 / (1.25 * 1.0625) ** 0.5]
    assert [item["score"] for item in scores] == pytest.approx(expected)
    pairs = await post(connect, site, "/v1/score", text_1=["up", "up"], text_2=["up", "east"])
    assert pairs.json["data"][0]["score"] == pytest.approx(1.0)
    assert pairs.json["usage"]["total_tokens"] == 8
    uneven = await post(connect, site, "/v1/score", text_1=["a", "b"], text_2=["c"])
    assert (uneven.status, uneven.error["param"]) == (400, "text_1")


async def test_documents_come_best_first(
    site: Any, connect: Any, directions: DirectionProcessor
) -> None:
    body = {"query": "east", "documents": ["north pole", {"text": "east coast"}, "elsewhere"]}
    ranked = (await post(connect, site, "/v1/rerank", top_n=2, **body)).json
    assert [item["index"] for item in ranked["results"]] == [1, 2]
    assert ranked["results"][0]["document"] == {"text": "east coast"}
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1.0)
    bare = (await post(connect, site, "/v1/rerank", return_documents=False, **body)).json
    assert all("document" not in item for item in bare["results"])
    wrong = await post(connect, site, "/v1/rerank", query="x", documents=[{"title": "y"}])
    assert (wrong.status, wrong.error["message"]) == (400, "documents: an object without text")


async def test_each_model_has_a_limit_of_its_own(open_site: Any, connect: Any) -> None:
    site = await open_site(max_concurrent_requests=1, max_waiting_requests=0)
    limits = site.application.generation.concurrency
    for name in ("busy", "idle"):
        served = ServedEmbeddingModel((name, f"{name}-2"), DirectionProcessor(), 1, 256, 3)
        site.gateway.add_embedding_model(served)
    await limits["busy"].acquire()
    for name, status in {"busy-2": 503, "idle-2": 200}.items():
        answer = await post(connect, site, "/v1/embeddings", model=name, input="east")
        assert answer.status == status
    limits["busy"].release()
    assert (await post(connect, site, "/v1/embeddings", model="busy", input="east")).status == 200
