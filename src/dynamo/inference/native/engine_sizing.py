"""Sizes of an engine that the settings leave open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import EngineInfo

if TYPE_CHECKING:
    from dynamo.inference.native.kv_storage import KvShape
    from dynamo.models.checkpoint.llama_config import LlamaConfig

DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
"""Enough tokens in a step to keep the matrix products at full speed. More only delays the tokens of
the other sequences in the step."""
KV_MEMORY_SHARE = 0.2
"""Share of the available memory for blocks. The areas of running sequences take at most the same
amount again."""

CGROUP_DIR = Path("/sys/fs/cgroup")
"""The folder in which a container finds its own limits."""


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan_engine_info(
    settings: EngineSettings, config: LlamaConfig, shape: KvShape, context_tokens: int
) -> EngineInfo:
    """Return the sizes of the engine. `context_tokens` 0: the limit of the model."""
    context = min(context_tokens or config.context_tokens, config.context_tokens)
    block_tokens = settings.block_size
    max_num_seqs = settings.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    num_blocks = settings.num_blocks
    if not num_blocks:
        max_useful_blocks = -(-context // block_tokens) * max_num_seqs
        fitting_blocks = int(available_memory_bytes() * KV_MEMORY_SHARE) // (
            shape.token_bytes * block_tokens
        )
        num_blocks = max(1, min(max_useful_blocks, fitting_blocks))
    return EngineInfo(
        engine="native",
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        context_tokens=min(context, num_blocks * block_tokens),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS,
        vocab_size=config.vocab_size,
        prefix_caching=settings.prefix_caching,
    )


def available_memory_bytes(group: Path = CGROUP_DIR) -> int:
    """Return the memory that is free without swapping, within the limit of the control group."""
    machine = _machine_memory_bytes()
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return machine
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cache = int(stat["inactive_file"])  # the kernel drops this cache on demand
    except (OSError, ValueError, KeyError):
        return machine
    return max(0, min(machine, int(limit) - used + cache))


def _machine_memory_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
