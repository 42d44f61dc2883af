"""The published embedding model, alone and beside a model that generates text."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.conftest import Deployment, until
from tests.support.tiny_bert import write_tiny_bert

TEXTS = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
SIMILARITIES = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}
"""The documentation of sentence-transformers prints these numbers for this model."""
EMBEDDED = re.compile(r"^dynamo_embedding_texts_total [1-9]", re.MULTILINE)

GRAPH = """
from dynamo.services import EmbeddingWorker, Frontend, Worker

Frontend.link(Worker).link(EmbeddingWorker)
"""


@pytest.fixture(scope="module")
def client(
    tmp_path_factory: pytest.TempPathFactory, runtime_environ: dict[str, str]
) -> Iterator[openai.OpenAI]:
    server = Deployment(["out=native", "minilm"], tmp_path_factory.mktemp("e"), runtime_environ)
    server.wait_ready(120)  # the first start fetches the model
    yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    server.stop()


def test_the_published_similarities_are_reproduced(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=TEXTS)
    vectors = [item.embedding for item in answer.data]
    for (first, second), expected in SIMILARITIES.items():
        cosine = sum(x * y for x, y in zip(vectors[first], vectors[second], strict=True))
        assert cosine == pytest.approx(expected, abs=5e-5)
    floats = client.embeddings.create(
        model="all-MiniLM-L6-v2", input=TEXTS, encoding_format="float"
    )
    assert [item.embedding for item in floats.data] == vectors


def test_a_thousand_texts_come_back_in_order(client: openai.OpenAI) -> None:
    texts = [f"{'very ' * (number % 9)}small text number {number}" for number in range(1_000)]
    together = client.embeddings.create(model="default", input=texts, dimensions=32)
    for number in (0, 1, 499, 998, 999):
        alone = client.embeddings.create(model="default", input=texts[number], dimensions=32)
        assert together.data[number].embedding == pytest.approx(alone.data[0].embedding, abs=1e-5)


def test_a_text_that_is_too_long_is_refused_or_cut(client: openai.OpenAI) -> None:
    long = "word " * 300
    with pytest.raises(openai.BadRequestError, match="302 tokens; the limit of all-MiniLM"):
        client.embeddings.create(model="default", input=["short", long])
    with pytest.raises(openai.BadRequestError, match="100000 characters; the limit"):
        client.embeddings.create(model="default", input="x" * 100_000)
    cut = client.embeddings.create(
        model="default", input=long, extra_body={"truncate_prompt_tokens": -1}
    )
    assert cut.usage.prompt_tokens == 256


def metrics_of(process: dict[str, Any]) -> str:
    with urllib.request.urlopen(f"{process['status_url']}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_a_graph_serves_both_kinds_and_survives_a_killed_worker(
    start: Any, tiny_model: Path, tmp_path: Path
) -> None:
    bert = write_tiny_bert(tmp_path / "bert")
    (tmp_path / "both.py").write_text(GRAPH)
    serve = start(
        *("both:Frontend", "--engine.kind", "mock", "--model-path", str(tiny_model)),
        *("--model-name", "tiny", f"--EmbeddingWorker.path={bert}", "--EmbeddingWorker.workers=2"),
        command="serve",
        folder=tmp_path,
    )
    until(lambda: serve.post("/v1/embeddings", {"input": "the fox"})[0] == 200)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    until(lambda: serve.post("/v1/completions", body)[0] == 200)

    def embedding_workers() -> list[dict[str, Any]]:
        return [p for p in serve.processes() if p["name"].startswith("EmbeddingWorker")]

    until(lambda: [p["state"] for p in embedding_workers()] == ["ready", "ready"])
    workers = embedding_workers()

    def both_have_embedded() -> bool:
        serve.post("/v1/embeddings", {"input": "the fox"})
        return all(re.search(EMBEDDED, metrics_of(worker)) for worker in workers)

    until(both_have_embedded)  # a frontend knows a worker some time after it is ready
    os.kill(workers[0]["pid"], signal.SIGKILL)
    answers = [serve.post("/v1/embeddings", {"input": "the fox"}) for _ in range(20)]
    assert [status for status, _ in answers] == [200] * 20
    assert len({tuple(answer["data"][0]["embedding"]) for _, answer in answers}) == 1
    assert serve.stop() == 0
