"""Workers over the memory planes: the endpoint `prefill`, its peers and their metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.fake_lora import write_adapter
from tests.support.relay import Relay
from tests.unit.inference_disaggregation.pair import make_request
from tests.unit.inference_disaggregation.workers import StartWorker

from dynamo.communication.transfer import RegionDescriptor, RegionPeer
from dynamo.communication.transfer.memory import MemoryTransfer
from dynamo.communication.transfer.tcp import TcpTransfer
from dynamo.core.errors import DeadlineExceeded, InvalidRequest, ProtocolError, TransferFailed
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.inference.disaggregation import prefill_endpoint, prefill_peers
from dynamo.inference.disaggregation.messages import (
    PrefillRequest,
    encode_prefill_request,
)


class AlteringRelay(Relay):
    """A relay that inverts the last byte of each answer while `alters` is True."""

    alters = False

    def make_reply_filter(self) -> Callable[[bytes], bytes]:
        return lambda data: data[:-1] + bytes([data[-1] ^ 0xFF]) if self.alters else data


@pytest.mark.parametrize(
    "start_worker", ["memory:", "shm:", "tcp://127.0.0.1:0", "auto"], indirect=True
)
async def test_a_worker_has_a_prompt_computed_by_the_one_that_the_request_names(
    start_worker: StartWorker,
) -> None:
    fast = {"timing": "constant:0.01,1"}
    d, p = await start_worker(**fast), await start_worker(**fast)
    request = make_request(range(42), prefill=p.id, max_tokens=8)
    alone = await d.answer(replace(request, prefill=""))
    d.ranks[0].clear_prefix_cache()
    reply = await d.answer(request)
    assert (reply.ids, reply.end) == (alone.ids, alone.end)
    assert reply.started is not None
    assert reply.started.worker == d.id
    assert d.sample("dynamo_worker_remote_prompts_total") == 1
    assert d.sample('dynamo_worker_kv_bytes_total{way="moved"}') == 11 * 64
    assert d.sample("dynamo_transfer_bytes_total") == 11 * 64
    assert d.sample("dynamo_worker_kv_wait_seconds_total") > 0
    assert p.ranks[0].counters.requests == 1
    assert p.sample("dynamo_worker_held_requests") == 0
    assert not d.ranks[0].arrivals.counters.fallbacks
    p.check_idle()
    d.check_idle()


async def test_a_prompt_of_an_adapter_is_computed_with_it(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    modules = [f"sql={write_adapter(tmp_path / 'sql')}"]
    d, p = [await start_worker(timing="constant:0.01,1", lora_modules=modules) for _ in range(2)]
    assert d.ranks[0].adapters is not None
    (adapter,) = d.ranks[0].adapters.paths
    request = make_request(range(42), max_tokens=8)
    with_adapter = replace(request, adapter=adapter, salt="sql")
    plain, alone = await d.answer(request), await d.answer(with_adapter)
    assert plain.ids != alone.ids
    d.ranks[0].clear_prefix_cache()
    reply = await d.answer(replace(with_adapter, prefill=p.id))
    assert (reply.ids, reply.end) == (alone.ids, alone.end)
    assert p.ranks[0].counters.requests == 1


@pytest.mark.parametrize("start_worker", ["memory:", "tcp://127.0.0.1:0"], indirect=True)
async def test_ranks_of_one_worker_compute_prompts_for_each_other(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(ranks=2, timing="constant:0.01,1")
    request = replace(make_request(range(42), max_tokens=8), rank=0)
    alone = await worker.answer(replace(request, prefill=""))
    for prefill, computed in ((f"{worker.id}/1", 1), (f"{worker.id}/0", 0), (worker.id, 0)):
        worker.ranks[0].clear_prefix_cache()
        before = worker.ranks[1].counters.requests
        reply = await worker.answer(replace(request, prefill=prefill))
        assert (reply.ids, reply.end) == (alone.ids, alone.end)
        assert worker.ranks[1].counters.requests == before + computed
    assert worker.ranks[0].arrivals.counters.blocks_arrived == 11
    assert not worker.ranks[0].arrivals.counters.fallbacks
    worker.check_idle()


async def test_a_new_role_is_in_every_record_that_routers_read(start_worker: StartWorker) -> None:
    worker = await start_worker()
    await worker.call("set_role", b"prefill", lambda _: True)

    records = await worker.runtime.discovery.get("/unit/workers/worker/")
    roles = {
        key.split("/")[-2]: engine["roles"]
        for key, value in records.items()
        if (engine := json.loads(value)["capabilities"].get("engine"))
    }
    assert roles.keys() >= {"prefill", "generate"}
    assert set(map(tuple, roles.values())) == {("prefill",)}
    (card,) = (await worker.runtime.discovery.get("/unit/models/")).values()
    assert json.loads(card)["engine"]["roles"] == ["prefill"]


@pytest.mark.parametrize("start_worker", ["tcp://127.0.0.1:0"], indirect=True)
@pytest.mark.parametrize("fault", ["reset", "closed", "silent", "altered"])
async def test_a_transfer_that_breaks_between_chunks_alters_no_token(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    chunked: dict[str, Any] = {"timing": "constant:0.5,5", "max_num_batched_tokens": 64}
    d = await start_worker(**chunked)
    listen = TcpTransfer._listen
    async with AlteringRelay() as relay:

        async def listen_behind_relay(plane: TcpTransfer) -> str:
            relay.target_port = int((await listen(plane)).rpartition(":")[2])
            return f"tcp://127.0.0.1:{relay.port}"

        monkeypatch.setattr(TcpTransfer, "_listen", listen_behind_relay)
        p = await start_worker(**chunked)
        request = make_request(range(400), prefill=p.id, max_tokens=8)
        async with BackgroundTasks() as tasks:
            answer = tasks.start(d.answer(request))
            while not d.ranks[0].arrivals.counters.blocks_arrived:
                await asyncio.sleep(0.005)
            if fault == "altered":
                relay.alters = True
            else:
                relay.end_connections(fault)  # type: ignore[arg-type]
            reply = await answer
        relay.alters = False
        (engine,) = d.ranks
        # A closed connection is dialled again, so that the next pull succeeds.
        reasons = {"silent": "transfer timeout", "altered": "transfer checksum"}
        assert set(engine.arrivals.counters.fallbacks) <= {reasons.get(fault, "transfer gone")}
        assert fault not in reasons or engine.arrivals.counters.fallbacks
        engine.clear_prefix_cache()
        alone = await d.answer(replace(request, prefill=""))
        assert (reply.ids, reply.end) == (alone.ids, alone.end)
        p.check_idle()
        d.check_idle()


async def test_a_worker_with_other_blocks_is_no_peer(start_worker: StartWorker) -> None:
    d, other = await start_worker(), await start_worker(layout="other weights")
    reply = await d.answer(make_request(range(20), prefill=other.id, max_tokens=3))
    assert len(reply.ids) == 3
    assert d.sample('dynamo_worker_prefill_fallbacks_total{reason="transfer refused"}') == 1
    assert other.ranks[0].counters.requests == 0
    assert f"blocks of {other.id} are not pulled" in d.runtime.health.limitations["kv_peers"]
    await other.worker.close()
    while d.runtime.health.limitations:
        await asyncio.sleep(0.01)


async def test_a_worker_whose_memory_is_out_of_reach_is_named(
    start_worker: StartWorker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, away = await start_worker(), await start_worker()

    async def refuse(_: object) -> None:
        raise TransferFailed.of("refused", "another secret")

    with monkeypatch.context() as patch:
        patch.setattr(d.worker._prefill._planes[0], "connect", refuse)
        reply = await d.answer(make_request(range(20), prefill=away.id, max_tokens=3))
        assert len(reply.ids) == 3
    assert "KV memory of a worker is out of reach" in caplog.text
    reachable = await start_worker()
    await d.answer(make_request(range(100, 140), prefill=reachable.id, max_tokens=3))
    assert reachable.ranks[0].counters.requests == 1
    assert caplog.text.count("out of reach") == 1


async def test_workers_connect_at_the_first_prompt(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[str] = []
    connect = MemoryTransfer.connect

    async def counted(plane: MemoryTransfer, descriptor: RegionDescriptor) -> RegionPeer:
        connected.append(plane.incarnation)
        return await connect(plane, descriptor)

    monkeypatch.setattr(MemoryTransfer, "connect", counted)
    workers = [await start_worker() for _ in range(4)]
    for _ in range(2):
        prompts = make_request(range(20), prefill=workers[1].id, max_tokens=3)
        await run_all(*(workers[0].answer(prompts) for _ in range(2)))
        workers[0].ranks[0].clear_prefix_cache()
    assert len(connected) == 1


async def test_a_worker_that_has_left_is_not_waited_for(start_worker: StartWorker) -> None:
    d, p = await start_worker(), await start_worker()
    await p.worker.close()
    started_s = asyncio.get_running_loop().time()
    reply = await d.answer(make_request(range(20), prefill=p.id, max_tokens=3))
    assert len(reply.ids) == 3
    assert asyncio.get_running_loop().time() - started_s < 0.9
    d.check_idle()


async def test_instances_that_left_are_forgotten_some_time(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_peers, "MAX_SEEN", 3)
    monkeypatch.setattr(prefill_peers, "APPEARANCE_S", 0.01)
    d = await start_worker()
    for number in range(5):
        await d.answer(make_request(range(number, 20), prefill=f"gone-{number}"))
    (peers,) = d.worker._prefill._peers
    assert len(peers._seen) == 3


async def test_a_prompt_goes_to_the_rank_of_its_beginning(start_worker: StartWorker) -> None:
    d, p = await start_worker(ranks=2), await start_worker(ranks=3)
    requests = [
        replace(make_request([start, *range(30)], prefill=p.id, max_tokens=2), rank=start % 2)
        for start in range(12)
    ]
    for _ in range(2):
        replies = await run_all(*(d.answer(request) for request in requests))
    assert sum(engine.counters.requests for engine in p.ranks) == 12
    assert all(engine.counters.requests for engine in p.ranks)
    assert [reply.started.cached_tokens for reply in replies if reply.started] == [28] * 12
    assert not any(engine.arrivals.counters.fallbacks for engine in d.ranks)
    p.check_idle()
    d.check_idle()


async def test_blocks_are_freed_when_nobody_takes_them(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_endpoint, "HOLD_S", 0.05)
    p = await start_worker()
    frames: list[bytes] = []

    def sink(frame: bytes) -> bool:
        frames.append(frame)
        return True

    call = PrefillRequest(make_request(range(20), prefill=p.id))
    with pytest.raises(DeadlineExceeded, match="are free now"):
        await p.call("prefill", encode_prefill_request(call), sink)
    assert [frame[:1] for frame in frames] == [b"q", b"b", b"f"]
    p.check_idle()


async def test_a_wrong_message_is_refused(start_worker: StartWorker) -> None:
    p = await start_worker()
    request = make_request(range(20), prefill=p.id)
    for payload, error in (
        (b"\xc1", ProtocolError),
        (encode_prefill_request(PrefillRequest(request, rank=1)), InvalidRequest),
        (encode_prefill_request(PrefillRequest(request, have_blocks=-1)), ProtocolError),
    ):
        with pytest.raises(error):
            await p.call("prefill", payload, lambda _: True)
    p.check_idle()


SLOW = {"timing": "constant:3,1", "max_num_batched_tokens": 16}


@pytest.mark.parametrize("start_worker", ["auto"], indirect=True)
async def test_a_prefill_worker_whose_connections_break_is_replaced(
    start_worker: StartWorker,
) -> None:
    d, p = await start_worker(**SLOW), await start_worker(**SLOW)
    request = make_request(range(64), prefill=p.id, max_tokens=5)
    alone = await p.answer(replace(request, prefill=""))
    p.ranks[0].clear_prefix_cache()
    async with BackgroundTasks() as tasks:
        answer = tasks.start(d.answer(request))
        while not d.ranks[0].arrivals.counters.blocks_arrived:
            await asyncio.sleep(0.005)
        await p.runtime.requests.close()
        assert (await answer).ids == alone.ids
    assert d.ranks[0].arrivals.counters.fallbacks == {"worker_failed": 1}
    p.check_idle()
    d.check_idle()


@pytest.mark.parametrize("start_worker", ["auto"], indirect=True)
async def test_the_end_of_a_decode_worker_frees_the_blocks_held_for_it(
    start_worker: StartWorker,
) -> None:
    d, p = await start_worker(**SLOW), await start_worker(**SLOW)
    request = make_request(range(64), prefill=p.id, max_tokens=5)
    async with BackgroundTasks(lambda _: None) as tasks:
        tasks.start(d.answer(request))
        while not p.ranks[0].report_load().running:
            await asyncio.sleep(0.005)
        await d.runtime.requests.close()
        while p.ranks[0].report_load().active_blocks:
            await asyncio.sleep(0.005)
    p.check_idle()
