"""`GPUMemoryOptimizer` and `BatchOptimizer`: the seeds' names and results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.inference import BatchOptimizer, GPUMemoryOptimizer
from dynamo.library.batch_optimizer import RequestFeatures, cluster_requests
from dynamo.library.gpu_memory_optimizer import optimal_block_size
from dynamo.scheduling.router.clustering import NOISE

ORACLE = Path(__file__).parents[2] / "data" / "oracle" / "clusters.json"
MODEL = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128}
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2


def test_the_size_of_a_block_is_the_power_of_two_above_the_largest_center() -> None:
    for case in json.loads(ORACLE.read_text())["kmeans"]:
        size = optimal_block_size(case["sizes"])
        largest = int(2 ** case["centers"][-1])
        assert size >= largest
        assert size == 1 or size < 2 * largest
        assert size & (size - 1) == 0
    assert optimal_block_size([4096] * 5) == 4096
    assert optimal_block_size([1]) == 1


async def test_a_layout_gives_each_sequence_its_blocks() -> None:
    optimizer = GPUMemoryOptimizer(SimpleNamespace())
    batch = SimpleNamespace(sequence_lengths=[100, 100, 1000])
    layout = await optimizer.optimize_memory_layout(MODEL, batch)
    assert layout.block_size == 1 << math.ceil(math.log2(1000 * TOKEN_BYTES))
    assert [entry.first_block for entry in layout.layout_plan] == [0, 1, 2]
    assert layout.memory_pool.blocks == 3
    used = 1200 * TOKEN_BYTES
    assert layout.expected_fragmentation == pytest.approx(1 - used / layout.memory_pool.total_size)
    for _ in range(9):
        optimizer.allocation_tracker.record(16 << 10)
    batch = SimpleNamespace(batch_size=2, max_seq_len=1000)
    layout = await optimizer.optimize_memory_layout({"kv_bytes_per_token": TOKEN_BYTES}, batch)
    assert [entry.size for entry in layout.layout_plan] == [1000 * TOKEN_BYTES] * 2
    assert optimizer.allocation_tracker.counts()[16 << 10] == 9
    assert optimizer.memory_pools[layout.block_size] == layout.memory_pool


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        ({}, {"sequence_lengths": [1]}, "model_config has no num_layers, num_kv_heads, head_dim"),
        (MODEL, {}, "batch_config has no sequence_lengths"),
        (MODEL, {"sequence_lengths": []}, "batch_config has no sequences"),
        (MODEL, {"sequence_lengths": [0]}, "an allocation has at least 1 byte, not 0"),
    ],
)
async def test_what_is_missing_is_named(model: Any, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await GPUMemoryOptimizer().optimize_memory_layout(model, batch)


def request(tokens: int, answer: int, model: str = "m", priority: int = 0) -> dict[str, Any]:
    return {
        "input_ids": [1] * tokens,
        "max_new_tokens": answer,
        "temperature": 0.7,
        "model": model,
        "priority": priority,
    }


async def test_similar_requests_of_a_model_share_a_batch() -> None:
    pending = [request(100 + number, 50) for number in range(4)]
    pending += [request(2000 + number, 400, priority=1) for number in range(3)]
    pending += [request(101, 50, "other"), request(101, 50, "other"), request(9000, 2000)]
    optimized = await BatchOptimizer({"max_batch_size": 2}).optimize_batch_composition(pending)
    batches = [[len(each["input_ids"]) for each in batch.requests] for batch in optimized.batches]
    assert batches[:2] == [[2000, 2001], [2002]]
    assert sorted(batches[2:]) == [[100, 101], [101, 101], [102, 103], [9000]]
    (alone,) = [batch for batch in optimized.batches if batch.label == NOISE]
    assert alone.padding == 0
    metrics = optimized.performance_metrics
    assert (metrics["requests"], metrics["batches"]) == (10, 6)
    assert metrics["padding_share"] < 0.01 < metrics["padding_share_of_one_batch"]
    assert optimized.optimization_strategy == "dbscan(eps=0.5, min_samples=2)"
    nothing = await BatchOptimizer().optimize_batch_composition([])
    assert nothing.batches == ()


def test_requests_that_are_like_no_other_are_noise() -> None:
    features = [RequestFeatures(length, 10, 0.7, "m", 0, 1.0, 1.0) for length in (10, 11, 5000)]
    assert cluster_requests(features) == [0, 0, NOISE]
