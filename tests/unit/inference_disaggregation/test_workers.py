"""Workers over the memory planes: the endpoint `prefill`, its peers and their metrics."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.inference_disaggregation.pair import make_request

from dynamo.communication.transfer import RegionDescriptor, RegionPeer
from dynamo.communication.transfer.memory import MemoryTransfer
from dynamo.communication.transfer.tcp import TcpTransfer
from dynamo.core.clock import SystemClock
from dynamo.core.codec import ReplyDecoder, encode_request
from dynamo.core.context import Context
from dynamo.core.errors import DeadlineExceeded, InvalidRequest, ProtocolError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import EngineSettings, RuntimeSettings
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import GenerateRequest
from dynamo.inference.data_parallel import DataParallelEngine
from dynamo.inference.disaggregation import prefill_endpoint
from dynamo.inference.disaggregation.messages import (
    PrefillRequest,
    encode_prefill_request,
)
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.mock.engine import make_mock_engine
from dynamo.inference.worker import EngineWorker
from dynamo.models.card import ModelCard
from dynamo.models.file_cache import FileRef
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.testing.fakes import CollectedReply
from dynamo.testing.relay import Relay

_numbers = count()


class LiveWorker:
    """A worker with a runtime of its own."""

    def __init__(
        self, runtime: DistributedRuntime, worker: EngineWorker, ranks: list[BatchedEngine]
    ) -> None:
        self.runtime = runtime
        self.worker = worker
        self.ranks = ranks
        self.id = runtime.instance_id

    async def call(self, endpoint: str, payload: bytes, sink: Callable[[bytes], bool]) -> None:
        path = f"unit.worker.{endpoint}"
        await self.runtime.requests.call(
            self.runtime.requests.address, path, payload, Context("r"), sink
        )

    async def answer(self, request: GenerateRequest) -> CollectedReply:
        reply = CollectedReply()
        await self.call("generate", encode_request(request), ReplyDecoder(reply).feed)
        return reply

    def sample(self, name: str) -> float:
        """Return a sample of the worker's metrics by its name and labels."""
        lines = [line for line in self.runtime.metrics.render().splitlines() if name in line]
        return float(lines[-1].rpartition(" ")[2]) if lines else 0.0

    def check_idle(self) -> None:
        for engine in self.ranks:
            assert engine.report_load().active_blocks == 0
            engine.scheduler.pool.check_invariants()


class AlteringRelay(Relay):
    """A relay that inverts the last byte of each answer while `alters` is True."""

    alters = False

    def make_reply_filter(self) -> Callable[[bytes], bytes]:
        return lambda data: data[:-1] + bytes([data[-1] ^ 0xFF]) if self.alters else data


StartWorker = Callable[..., Awaitable[LiveWorker]]


@pytest.fixture(params=["memory:"])
async def start_worker(
    tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[StartWorker]:
    """Return `start_worker(layout=..., ranks=..., **engine settings)`. The parameter is the URL of
    the transfer plane; with another one than `memory:`, calls go over TCP."""
    transfer: str = request.param
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"{}")
    sha256 = hashlib.sha256(b"{}").hexdigest()
    card = ModelCard(("m",), 4096, 1000, FileRef("tokenizer.json", sha256, 2, str(path)))
    discovery = f"memory:prefill-{next(_numbers)}"
    planes = RuntimeSettings(
        discovery=discovery,
        requests="memory:" if transfer == "memory:" else "tcp://127.0.0.1:0",
        events=discovery,
        transfer=transfer,
        namespace="unit",
    )
    async with AsyncExitStack() as stack:

        async def start(layout: str = "mock", ranks: int = 1, **settings: Any) -> LiveWorker:
            runtime = await DistributedRuntime.create(Settings(runtime=planes), role="worker")
            await stack.enter_async_context(runtime)
            engine_settings = EngineSettings(kind="mock", block_size=4, **settings)
            engines = [
                make_mock_engine(
                    engine_settings,
                    range(100, 900),
                    SystemClock(),
                    context_tokens=4096,
                    vocab_size=1000,
                    layout=layout,
                )
                for _ in range(ranks)
            ]
            engine = engines[0] if ranks == 1 else DataParallelEngine(engines)
            worker = EngineWorker(engine, card)
            await worker.attach(runtime)
            runtime.add_shutdown_hook(worker.close)
            return LiveWorker(runtime, worker, engines)

        yield start


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
    assert d.sample('dynamo_worker_prefill_fallbacks_total{reason="transfer gone"}') == 1
    assert other.ranks[0].counters.requests == 0


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
    assert [frame[:1] for frame in frames] == [b"b", b"f"]
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
