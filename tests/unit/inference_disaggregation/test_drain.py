"""Requests that leave a draining worker take their KV blocks along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.inference_disaggregation.pair import make_request
from tests.unit.inference_disaggregation.workers import LiveWorker, StartWorker
from tests.unit.processes import send_through

from dynamo.core.context import Context
from dynamo.core.reply import SendRequest
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import GenerateRequest
from dynamo.inference.disaggregation import prefill_endpoint
from dynamo.runtime.calls.failure_detector import FailureDetector
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.router.features import decodes
from dynamo.testing.fakes import CollectedReply

TIMING: dict[str, Any] = {"timing": "constant:0.5,5"}
REQUESTS = [
    make_request(range(at, at + 60), prefill="", max_tokens=80) for at in range(100, 500, 100)
]
Leave = Callable[[LiveWorker], Awaitable[object]]


@asynccontextmanager
async def open_frontend(worker: LiveWorker) -> AsyncIterator[SendRequest]:
    """A frontend of the deployment of `worker`, without text."""
    async with await DistributedRuntime.create(worker.runtime.settings, role="frontend") as runtime:
        component = runtime.namespace("unit").component("worker")
        client = await component.endpoint("generate").client(decodes)
        detector = FailureDetector(runtime.requests, runtime.clock, runtime.tasks, runtime.metrics)
        detector.watch(client)
        yield send_through(client, "least_loaded")


async def answer_while_a_worker_leaves(
    send: SendRequest, workers: list[LiveWorker], leave: Leave, requests: list[GenerateRequest]
) -> list[CollectedReply]:
    """Send the requests, let the first worker leave in the middle, and return the answers."""
    replies = [CollectedReply() for _ in requests]
    async with BackgroundTasks() as tasks:
        sent = [
            tasks.start(send(replace(request, request_id=str(at)), Context(str(at)), reply))
            for at, (request, reply) in enumerate(zip(requests, replies, strict=True))
        ]
        while min(len(reply.ids) for reply in replies) < 10:
            await asyncio.sleep(0.005)
        assert all(worker.ranks[0].report_load().running for worker in workers)
        await leave(workers[0])
        for task in sent:
            await task
    return replies


async def drain(worker: LiveWorker) -> None:
    await worker.runtime.shutdown(5.0)


async def become_a_prefill_worker(worker: LiveWorker) -> None:
    await worker.call("set_role", b"prefill", lambda _: True)


@pytest.mark.parametrize("start_worker", ["memory:", "shm:", "auto"], indirect=True)
@pytest.mark.parametrize("leave", [drain, become_a_prefill_worker])
async def test_running_requests_take_their_blocks_along(
    start_worker: StartWorker, leave: Leave
) -> None:
    workers = [await start_worker(**TIMING) for _ in range(2)]
    alone = await run_all(*(workers[1].answer(request) for request in REQUESTS))
    workers[1].ranks[0].clear_prefix_cache()
    async with open_frontend(workers[0]) as send:
        replies = await answer_while_a_worker_leaves(send, workers, leave, REQUESTS)
    assert [reply.ids for reply in replies] == [reply.ids for reply in alone]
    counters = workers[1].ranks[0].arrivals.counters
    assert (counters.moved, counters.fallbacks) == (2, {})
    assert counters.blocks_arrived >= 2 * 70 // 4
    assert workers[1].sample("dynamo_worker_moved_requests_total") == 2
    for worker in workers:
        worker.check_idle()


async def test_a_worker_that_drains_waits_for_those_that_take_over(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that takes over has no free batch slot when the request comes."""
    monkeypatch.setattr(prefill_endpoint, "HANDOVER_S", 30.0)
    workers = [await start_worker(**TIMING), await start_worker(**TIMING, max_num_seqs=2)]
    async with open_frontend(workers[0]) as send:
        replies = await answer_while_a_worker_leaves(send, workers, drain, REQUESTS)
    assert [len(reply.ids) for reply in replies] == [80] * 4
    assert workers[1].ranks[0].arrivals.counters.moved == 2


async def test_requests_without_a_token_and_the_last_worker_keep_their_way(
    start_worker: StartWorker,
) -> None:
    workers = [await start_worker(timing="constant:0.5,200") for _ in range(2)]
    async with open_frontend(workers[0]) as send, BackgroundTasks() as tasks:
        replies = [CollectedReply() for _ in range(2)]
        sent = [
            tasks.start(send(replace(REQUESTS[0], request_id=str(at)), Context(str(at)), reply))
            for at, reply in enumerate(replies)
        ]
        while not workers[0].ranks[0].report_load().running:
            await asyncio.sleep(0.005)
        assert not any(reply.ids for reply in replies)
        draining = tasks.start(workers[0].runtime.shutdown(5.0))
        while workers[1].ranks[0].counters.requests < 2:
            await asyncio.sleep(0.005)
        assert workers[1].ranks[0].arrivals.counters.prompts == 0
        await draining
        for task in sent:
            task.cancel()


async def test_a_draining_prefill_worker_computes_the_prompts_it_has(
    start_worker: StartWorker,
) -> None:
    slow = {"timing": "constant:3,1", "max_num_batched_tokens": 16}
    d, p = await start_worker(**slow), await start_worker(**slow)
    request = make_request(range(64), prefill=p.id, max_tokens=5)
    async with BackgroundTasks() as tasks:
        answer = tasks.start(d.answer(request))
        while not d.ranks[0].arrivals.counters.blocks_arrived:
            await asyncio.sleep(0.005)
        await p.runtime.shutdown(5.0)
        assert len((await answer).ids) == 5
    assert not d.ranks[0].arrivals.counters.fallbacks
    assert len((await d.answer(make_request(range(500, 509), prefill=p.id, max_tokens=5))).ids) == 5
    assert d.ranks[0].arrivals.counters.fallbacks == {"transfer gone": 1}
    d.check_idle()


async def test_the_blocks_are_where_the_request_ran(start_worker: StartWorker) -> None:
    """With several data-parallel ranks, the request tells which one has its blocks."""
    d, p = await start_worker(**TIMING), await start_worker(ranks=2, **TIMING)
    request = make_request(range(60), prefill="", max_tokens=3)
    for rank in range(2):
        p.ranks[rank].clear_prefix_cache()
        d.ranks[0].clear_prefix_cache()
        await p.answer(replace(request, rank=rank))
        reply = await d.answer(replace(request, kv_from=f"{p.id}/{rank}", resumed=1))
        assert reply.started is not None
        assert reply.started.cached_tokens == 56
        p.ranks[rank].clear_prefix_cache()
