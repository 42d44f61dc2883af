"""A worker with data-parallel ranks: each rank is an engine with its own scheduler and cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import astuple, replace

from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, DynamoError
from dynamo.core.reply import Engine, Reply
from dynamo.core.tasks import run_all
from dynamo.core.values import EngineInfo, EngineTotals, GenerateRequest, Load, sum_loads
from dynamo.inference.engine import BatchedEngine


class DataParallelEngine(Engine):
    """Sends each request to the rank that it names, else to the rank with the fewest requests."""

    def __init__(self, ranks: Sequence[Engine]) -> None:
        self._ranks = tuple(ranks)
        self.adapters = ranks[0].adapters
        for rank in ranks:
            rank.adapters = self.adapters

    @property
    def ranks(self) -> Sequence[Engine]:
        return self._ranks

    async def start(self) -> EngineInfo:
        infos = await run_all(*(rank.start() for rank in self.ranks))
        first, count = infos[0], len(infos)
        if any(info != first for info in infos):
            raise ConfigError("all data-parallel ranks must have the same EngineInfo")
        blocks, seqs = first.num_blocks * count, first.max_num_seqs * count
        return replace(first, num_blocks=blocks, max_num_seqs=seqs, data_parallel=count)

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        await self._choose_rank(request).generate(request, context, reply)

    def has_request(self, reply: Reply) -> bool:
        return all(rank.has_request(reply) for rank in self.ranks)

    def report_load(self) -> Load:
        """Return the sum over all ranks and the load of each rank."""
        loads = tuple(rank.report_load() for rank in self.ranks)
        return replace(sum_loads(loads), ranks=loads)

    async def stop(self) -> None:
        await run_all(*(rank.stop() for rank in self.ranks))

    @property
    def failure(self) -> DynamoError | None:  # type: ignore[override]
        return next((rank.failure for rank in self.ranks if rank.failure is not None), None)

    def on_failure(self, listener: Callable[[], None]) -> None:
        for rank in self.ranks:
            rank.on_failure(listener)

    def sleep_refusal(self, level: int) -> str:
        return self.ranks[0].sleep_refusal(level)

    async def sleep(self, level: int) -> None:
        await run_all(*(rank.sleep(level) for rank in self.ranks))

    async def wake_up(self) -> None:
        await run_all(*(rank.wake_up() for rank in self.ranks))

    async def clear_blocks(self) -> int:
        return sum([await rank.clear_blocks() for rank in self.ranks])

    def totals(self) -> EngineTotals | None:
        """Return the sums over the ranks that count."""
        totals = [total for rank in self.ranks if (total := rank.totals()) is not None]
        if not totals:
            return None
        return EngineTotals(*map(sum, zip(*map(astuple, totals), strict=True)))

    def _choose_rank(self, request: GenerateRequest) -> Engine:
        if request.rank is not None and request.rank < len(self.ranks):
            return self.ranks[request.rank]
        return min(self.ranks, key=_count_requests)


def batched_engines(engine: Engine) -> Sequence[BatchedEngine]:
    """Return the ranks whose KV blocks are in memory of this process: only these have tiers, and
    exchange blocks with other workers."""
    return [rank for rank in engine.ranks if isinstance(rank, BatchedEngine)]


def _count_requests(engine: Engine) -> int:
    load = engine.report_load()
    return load.running + load.waiting
