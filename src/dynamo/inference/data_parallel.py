"""A worker with data-parallel ranks: one engine each, with a scheduler and a prefix cache of its
own."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from dynamo.core.context import Context
from dynamo.core.errors import ConfigError
from dynamo.core.reply import Engine, Reply
from dynamo.core.tasks import run_all
from dynamo.core.values import EngineInfo, GenerateRequest, Load, sum_loads


class DataParallelEngine(Engine):
    """`ranks`: engines of one kind, by rank. A request goes to the rank that it names, else to the
    one with the fewest requests."""

    def __init__(self, ranks: Sequence[Engine]) -> None:
        self.ranks = tuple(ranks)

    async def start(self) -> EngineInfo:
        infos = await run_all(*(rank.start() for rank in self.ranks))
        first, count = infos[0], len(infos)
        if any(info != first for info in infos):
            raise ConfigError("data-parallel ranks must be alike")
        blocks, places = first.num_blocks * count, first.max_num_seqs * count
        return replace(first, num_blocks=blocks, max_num_seqs=places, data_parallel=count)

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        await self._choose_rank(request).generate(request, context, reply)

    def has_request(self, reply: Reply) -> bool:
        return all(rank.has_request(reply) for rank in self.ranks)

    def report_load(self) -> Load:
        """Of all ranks together, and of each."""
        loads = tuple(rank.report_load() for rank in self.ranks)
        return replace(sum_loads(loads), ranks=loads)

    async def stop(self) -> None:
        await run_all(*(rank.stop() for rank in self.ranks))

    def _choose_rank(self, request: GenerateRequest) -> Engine:
        if request.rank is not None and request.rank < len(self.ranks):
            return self.ranks[request.rank]
        return min(self.ranks, key=_count_requests)


def engines_by_rank(engine: Engine) -> Sequence[tuple[int | None, Engine]]:
    """The engines that really compute; with their ranks, where there are several."""
    if isinstance(engine, DataParallelEngine):
        return tuple(enumerate(engine.ranks))
    return ((None, engine),)


def _count_requests(engine: Engine) -> int:
    load = engine.report_load()
    return load.running + load.waiting
