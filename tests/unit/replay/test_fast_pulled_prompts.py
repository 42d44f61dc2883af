"""Prompts that other workers compute in a fast replay."""

from __future__ import annotations

import math

from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.timing.model import Timing
from dynamo.core.values import EngineInfo
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.replay import ReplayPlan
from dynamo.operations.replay.trace import TraceConversation, TraceRequest
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers


def test_prompts_without_a_known_block_are_pulled_side_by_side() -> None:
    def group(role: str) -> ReplayGroup:
        engine = EngineInfo("mock", 64, 4096, 32_768, 64, 8192, roles=(role,))
        return ReplayGroup(2 if role == "prefill" else 1, engine, Timing(10.0, 0.1))

    workers = ReplayWorkers(
        [group("prefill"), group("decode")], "lru", prefix_caching=False, transfer=1e15
    )
    routing = RouterSettings(mode="kv", max_queue_wait=math.inf)
    requests = [TraceConversation(0.0, [TraceRequest(row, 1000, 20)]) for row in range(20)]
    result, _ = FastReplay(ReplayPlan("test", workers, routing)).run(requests)
    assert result.completed == 20
    # 20 prompts of 110 ms on two workers, and 20 steps of answers; one by one it is 2.5 s.
    assert result.duration_s < 2.0
