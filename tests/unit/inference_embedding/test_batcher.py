"""The texts of several requests in common steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from dynamo.core.errors import WorkerFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo.inference.embedding import server
from dynamo.inference.embedding.server import EmbeddingBatcher


class SumEncoder:
    """The vector of a text is the sum of its ids. `gate` holds steps; the id 99 fails."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.steps: list[list[Sequence[int]]] = []

    def encode(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        self.gate.wait(10)
        self.steps.append(list(texts))
        if any(99 in text for text in texts):
            raise ValueError("99")
        return np.array([[sum(text)] for text in texts], np.float32)


@pytest.fixture
def encoder() -> SumEncoder:
    return SumEncoder()


@pytest.fixture
async def running(encoder: SumEncoder) -> AsyncIterator[EmbeddingBatcher]:
    async with BackgroundTasks() as tasks:
        embeddings = EmbeddingBatcher(encoder.encode, 2)
        tasks.start(embeddings.run())
        yield embeddings
        await tasks.close()
        embeddings.close()


async def test_each_request_gets_its_vectors_in_order(running: EmbeddingBatcher) -> None:
    requests = [[(n, m) for m in range(1, 40)] for n in range(20)]
    async with BackgroundTasks() as tasks:
        answers = [await task for task in [tasks.start(running.embed(r)) for r in requests]]
    for request, vectors in zip(requests, answers, strict=True):
        assert [float(vector[0]) for vector in vectors] == [float(sum(text)) for text in request]
    assert not running.waiting
    assert (running.texts, running.tokens) == (20 * 39, 2 * 20 * 39)
    assert running.steps < 20


async def test_a_short_request_does_not_wait_for_all_of_a_long_one(
    running: EmbeddingBatcher, encoder: SumEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STEP_TOKENS", 16)
    async with BackgroundTasks() as tasks:
        encoder.gate.clear()
        long = tasks.start(running.embed([(1,)] * 2_000))
        await asyncio.sleep(0.01)
        short = tasks.start(running.embed([(2,), (3,)]))
        await asyncio.sleep(0)
        encoder.gate.set()
        assert [float(vector[0]) for vector in await short] == [2, 3]
        assert not long.done()
        assert len(await long) == 2_000


async def test_a_cancelled_request_is_not_computed(
    running: EmbeddingBatcher, encoder: SumEncoder
) -> None:
    async with BackgroundTasks() as tasks:
        encoder.gate.clear()
        first = tasks.start(running.embed([(1,)]))
        await asyncio.sleep(0.01)
        second = tasks.start(running.embed([(2,)]))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.wait([second])
        assert not running.waiting
        encoder.gate.set()
        await first
    assert encoder.steps == [[(1,)]]


async def test_a_failing_step_fails_its_requests_and_no_later_one(
    running: EmbeddingBatcher,
) -> None:
    with pytest.raises(WorkerFailed, match="the encoder failed: 99"):
        await running.embed([(99,)])
    assert len(await running.embed([(1,)])) == 1


async def test_requests_that_wait_fail_when_the_worker_stops(encoder: SumEncoder) -> None:
    embeddings = EmbeddingBatcher(encoder.encode, 1)
    async with BackgroundTasks() as tasks:
        waiting = tasks.start(embeddings.embed([(1,)]))
        await asyncio.sleep(0)
        embeddings.close()
        with pytest.raises(WorkerFailed, match="the worker was stopped"):
            await waiting


async def test_requests_in_the_present_step_fail_when_the_worker_stops(
    encoder: SumEncoder,
) -> None:
    embeddings = EmbeddingBatcher(encoder.encode, 1)
    encoder.gate.clear()
    async with BackgroundTasks() as steps, BackgroundTasks() as tasks:
        steps.start(embeddings.run())
        running = tasks.start(embeddings.embed([(1,)]))
        await asyncio.sleep(0.01)
        await steps.close()
        embeddings.close()
        with pytest.raises(WorkerFailed, match="the worker was stopped"):
            await running
        encoder.gate.set()
