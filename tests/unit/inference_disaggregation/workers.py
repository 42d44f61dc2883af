"""Workers that serve mock engines in one process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.support.invariants import check_pool

from dynamo.core.codec import ReplyDecoder, encode_request
from dynamo.core.context import Context
from dynamo.core.values import GenerateRequest
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.worker import EngineWorker
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.testing.fakes import CollectedReply


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
        """Return the sum of the worker's metrics whose name and labels begin so."""
        lines = self.runtime.metrics.render().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def check_idle(self) -> None:
        for engine in self.ranks:
            assert engine.report_load().active_blocks == 0
            check_pool(engine.scheduler.pool)


StartWorker = Callable[..., Awaitable[LiveWorker]]
