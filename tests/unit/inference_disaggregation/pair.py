"""Two mock engines in virtual time, one of which computes prompts for the other."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace
from tests.support.invariants import check_pool

from dynamo.communication.transfer import MemoryRegion, RegionPeer
from dynamo.communication.transfer.memory import MemoryTransfer
from dynamo.core.context import Context
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.timing.model import StepTiming, Timing
from dynamo.core.values import EngineInfo, GenerateRequest, SamplingParams, StopConditions
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.inference.disaggregation.peer_prefill import PeerPrefill, PrefillPeer
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.kv_source import PrefillSink
from dynamo.inference.mock.simulated_engine import make_simulated_engine
from dynamo.testing.fakes import CollectedReply

BLOCK_TOKENS = 4
TIMING = Timing(c0=2.0, c1=1.0)
T = TypeVar("T")


class SimulatedWorker:
    """An engine with a region on a `memory:` plane. As a peer it calls `prefill` of the engine."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        timing: StepTiming = TIMING,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        prefix_caching: bool = True,
        slot_bytes: int = 1000,
        bytes_per_s: float = 1e6,
    ) -> None:
        self.clock = clock
        self.region = MemoryRegion.allocate(num_blocks, slot_bytes)
        self.plane = MemoryTransfer(clock, bytes_per_s=bytes_per_s)
        info = EngineInfo(
            "mock",
            BLOCK_TOKENS,
            num_blocks,
            num_blocks * BLOCK_TOKENS,
            max_num_seqs,
            max_num_batched_tokens,
        )
        self.engine, self.fast_forward = make_simulated_engine(
            info,
            timing,
            clock,
            wait_until_quiescent=clock.wait_until_idle,
            eviction="lru",
            vocabulary=range(100, 900),
            prefix_caching=prefix_caching,
            region=self.region,
        )

    async def start(self) -> None:
        await self.engine.start()
        self.descriptor = await self.plane.expose(self.region, "layout")

    async def stop(self) -> None:
        await self.engine.stop()
        await self.plane.close()

    def check_idle(self) -> None:
        """Assert that no request and no arrival is left and that every block is free or cached."""
        load = self.engine.report_load()
        assert (load.running, load.waiting, load.arriving, load.active_blocks) == (0, 0, 0, 0)
        check_pool(self.engine.scheduler.pool)
        arriving = self.engine.scheduler.arriving
        assert not any((arriving.sequences, arriving.new, arriving.preempted, arriving.arrived))


class DirectPeer(PrefillPeer):
    """Calls the engine of another worker without a request plane, like the simulated cluster."""

    def __init__(self, worker: SimulatedWorker, caller: SimulatedWorker) -> None:
        self._worker = worker
        self._caller = caller
        self.calls = 0
        self.before_call: Callable[[], Awaitable[None]] | None = None

    async def connect(self, rank: int) -> RegionPeer:
        assert rank == 0
        return await self._caller.plane.connect(self._worker.descriptor)

    async def prefill(
        self,
        rank: int,
        request: GenerateRequest,
        context: Context,
        have_blocks: int,
        sink: PrefillSink,
    ) -> None:
        assert rank == 0
        self.calls += 1
        if self.before_call is not None:
            await self.before_call()
        await self._worker.engine.prefill(request, context, have_blocks, sink)


class Pair:
    """Worker `p` computes prompts for worker `d`."""

    def __init__(
        self, clock: VirtualClock, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None
    ) -> None:
        self.clock = clock
        self.p = SimulatedWorker(clock, **(p or {}))
        self.d = SimulatedWorker(clock, **(d or {}))
        self.peer = DirectPeer(self.p, self.d)
        self.peers: dict[str, PrefillPeer] = {"p": self.peer}
        self.tasks = BackgroundTasks()

    async def start(self) -> None:
        await self.p.start()
        await self.d.start()
        self.source = PeerPrefill(self._find, self.clock, "d")
        self.d.engine.kv_source = self.source

    async def _find(self, instance_id: str) -> PrefillPeer | None:
        return self.peers.get(instance_id)

    def send(
        self,
        request: GenerateRequest,
        engine: BatchedEngine | None = None,
        limit: int | None = None,
        attempt: int = 0,
    ) -> tuple[CollectedReply, asyncio.Task[None]]:
        """Send a request to `d`, or to `engine`."""
        reply = CollectedReply(limit)
        target = engine or self.d.engine
        context = Context("r", attempt=attempt)
        return reply, self.tasks.start(target.generate(request, context, reply))

    async def answer(self, request: GenerateRequest, limit: int | None = None) -> CollectedReply:
        """Send a request to `d` and return its answer."""
        reply, task = self.send(request, limit=limit)
        await task
        return reply

    async def check_idle(self) -> None:
        """Assert that nothing is left over on both workers."""
        await self.clock.wait_until_idle()
        self.p.check_idle()
        self.d.check_idle()

    @property
    def arrivals(self) -> Any:
        return self.d.engine.arrivals.counters

    async def stop(self) -> None:
        await self.tasks.close()
        await self.p.stop()
        await self.d.stop()


def make_request(
    ids: Sequence[int] | range,
    *,
    prefill: str = "p",
    sampling: SamplingParams | None = None,
    resumed: int = 0,
    top_logprobs: int | None = None,
    salt: str = "",
    choice: int = 0,
    priority: int = 0,
    **stops: Any,
) -> GenerateRequest:
    return GenerateRequest(
        "r",
        "m",
        array("I", ids).tobytes(),
        sampling or SamplingParams(),
        StopConditions(**{"max_tokens": 20, **stops}),
        prefill=prefill,
        resumed=resumed,
        top_logprobs=top_logprobs,
        salt=salt,
        choice=choice,
        priority=priority,
    )


async def local_answer(pair: Pair, request: GenerateRequest) -> CollectedReply:
    """Return the answer of the prefill worker alone, which then forgets the prompt."""
    reply, task = pair.send(replace(request, prefill=""), pair.p.engine)
    await task
    pair.p.engine.clear_prefix_cache()
    return reply


def with_pair(
    main: Callable[[Pair], Coroutine[Any, Any, T]],
    p: dict[str, Any] | None = None,
    d: dict[str, Any] | None = None,
    make_pair: type[Pair] = Pair,
) -> T:
    """Run `main` with a started pair in virtual time, and check afterwards that it is idle."""

    async def run(clock: VirtualClock) -> T:
        pair = make_pair(clock, p, d)
        await pair.start()
        try:
            result = await main(pair)
            await pair.check_idle()
            return result
        finally:
            await pair.stop()

    return run_in_virtual_time(run)
