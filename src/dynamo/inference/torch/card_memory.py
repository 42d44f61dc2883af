"""The memory of a card: what a worker may use of it, and what its KV blocks get."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.inference.native.engine_sizing import MIN_KV_TOKENS
from dynamo.inference.native.kv_storage import KvShape
from dynamo.models.checkpoint.decoder_config import DecoderConfig

DEFAULT_UTILIZATION = 0.9
GRAPH_BYTES = 512 << 20
"""Kept free for CUDA graphs and for the matrix library."""


def card_budget(settings: EngineSettings) -> int:
    """Return the bytes that one engine of a worker may use: its share of the card, and at most what
    others leave free. Called before anything is loaded."""
    free, total = map(int, torch.cuda.mem_get_info())
    share = settings.gpu_memory_utilization or DEFAULT_UTILIZATION
    return min(int(total * share), free) // settings.data_parallel_size


def check_weights(config: DecoderConfig, shape: KvShape, context: int, budget: int) -> None:
    """Raise `ConfigError` if the weights leave no room for the fewest blocks."""
    weights = config.count_weights() * shape.element_bytes
    blocks = min(MIN_KV_TOKENS, context) * shape.token_bytes
    if weights + blocks > budget:
        raise _too_little(
            f"its weights take {_mb(weights)} MB in {shape.dtype} and {MIN_KV_TOKENS} tokens of "
            f"context {_mb(blocks)} MB",
            budget,
        )


def measure_kv_bytes(
    settings: EngineSettings, shape: KvShape, context: int, budget: int, step: Callable[[], object]
) -> int:
    """Return the bytes for KV blocks: what the weights and the largest `step` leave of the budget.
    Raises `ConfigError`."""
    torch.cuda.reset_peak_memory_stats()
    try:
        step()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        raise _too_little(
            "a step of --max-num-batched-tokens does not fit beside its weights", budget
        ) from error
    used = int(torch.cuda.max_memory_allocated()) + GRAPH_BYTES
    torch.cuda.empty_cache()
    tokens = min(MIN_KV_TOKENS, context)
    if settings.num_blocks:
        tokens = settings.num_blocks * settings.block_size
    if budget - used < tokens * shape.token_bytes:
        raise _too_little(
            f"weights and the largest step take {_mb(used)} MB and {tokens} tokens of context "
            f"{_mb(tokens * shape.token_bytes)} MB",
            budget,
        )
    return budget - used


def _too_little(reason: str, budget: int) -> ConfigError:
    free, total = torch.cuda.mem_get_info()
    return ConfigError(
        f"the model does not fit into {_mb(budget)} MB of {torch.cuda.get_device_name()}: {reason} "
        f"({_mb(free)} of {_mb(total)} MB are free)",
        hint="raise --gpu-memory-utilization, stop what else uses the card, lower --num-blocks or "
        "--max-num-batched-tokens, or serve a smaller model",
        param="engine.gpu_memory_utilization",
    )


def _mb(size: int) -> int:
    return round(size / 1e6)
