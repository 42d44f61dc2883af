"""Sizes of an engine that the settings leave open."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import OWN_FEATURES, EngineInfo

if TYPE_CHECKING:
    from dynamo.inference.native.kv_storage import KvShape
    from dynamo.models.checkpoint.decoder_config import DecoderConfig

log = logging.getLogger(__name__)

DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
"""Enough tokens in a step to keep the matrix products at full speed. More only delays the tokens of
the other sequences in the step."""
KV_MEMORY_SHARE = 0.2
"""Share for blocks of the memory that the weights leave. The areas of running sequences take at
most the same amount again."""
MIN_KV_TOKENS = 1024
"""An engine whose blocks would hold fewer tokens does not start, unless the model's context is
shorter or `num_blocks` is set."""

CGROUP_ROOT = Path("/sys/fs/cgroup")
SELF_CGROUP = Path("/proc/self/cgroup")
GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of a control group of version 2 and 1: limit, usage, and the key of unused file cache in
memory.stat."""


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan_engine_info(
    settings: EngineSettings,
    config: DecoderConfig,
    shape: KvShape,
    context_tokens: int,
    memory_bytes: int,
    max_kv_bytes: int = 0,
) -> EngineInfo:
    """Return the sizes of the engine. `context_tokens` 0: the limit of the model.

    `memory_bytes` is what this engine may use. Raises `ConfigError` if that is too little.
    `max_kv_bytes` is the size of its blocks, if these are not counted; 0: a share of the memory.
    """
    context = min(context_tokens or config.context_tokens, config.context_tokens)
    block_tokens = settings.block_size
    max_num_seqs = settings.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    max_useful_blocks = -(-context // block_tokens) * max_num_seqs
    weight_bytes = shape.element_bytes * config.count_weights()
    num_blocks, rule = settings.num_blocks, "--num-blocks"
    if not num_blocks:
        kv_bytes, rule = max_kv_bytes, "cache.max_cache_size"
        if not kv_bytes:
            kv_bytes = plan_kv_bytes(memory_bytes, weight_bytes, shape, context)
            rule = f"{KV_MEMORY_SHARE:.0%} of the memory that the weights leave"
        num_blocks = max(1, kv_bytes // (shape.token_bytes * block_tokens))
        if num_blocks > max_useful_blocks:
            num_blocks, rule = max_useful_blocks, "--max-num-seqs times the context"
    fields = {
        "blocks": num_blocks,
        "tokens": num_blocks * block_tokens,
        "kv_mb": _megabytes(num_blocks * block_tokens * shape.token_bytes),
        "weights_mb": _megabytes(weight_bytes),
        "memory_mb": _megabytes(memory_bytes),
        "rule": rule,
    }
    log.info("KV blocks are planned", extra={"fields": fields})
    return EngineInfo(
        engine="native",
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        context_tokens=min(context, num_blocks * block_tokens),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS,
        vocab_size=config.vocab_size,
        prefix_caching=settings.prefix_caching,
        features=(*OWN_FEATURES, "prompt_logprobs"),
    )


def plan_kv_bytes(memory_bytes: int, weight_bytes: int, shape: KvShape, context: int) -> int:
    """Return the memory for KV blocks. Raises `ConfigError` if it holds too few tokens."""
    tokens = min(MIN_KV_TOKENS, context)
    rest_bytes = round(tokens * shape.token_bytes / KV_MEMORY_SHARE)
    if memory_bytes >= weight_bytes + rest_bytes:
        return int((memory_bytes - weight_bytes) * KV_MEMORY_SHARE)
    raise ConfigError(
        f"the engine has {_megabytes(memory_bytes)} MB of memory and needs "
        f"{_megabytes(weight_bytes + rest_bytes)} MB: {_megabytes(weight_bytes)} MB for the "
        f"model's weights and {_megabytes(rest_bytes)} MB to compute {tokens} tokens of context",
        hint="free memory, raise the container's limit, lower --kv-host-size, start fewer workers "
        "or ranks, or serve a smaller model; --num-blocks sets the number of KV blocks without "
        "this check",
    )


def _megabytes(size: int) -> int:
    return round(size / 1e6)


def available_memory_bytes(
    workers: int = 1, root: Path = CGROUP_ROOT, membership: Path = SELF_CGROUP
) -> int:
    """Return the memory that is free without swapping, within the limits of the control groups that
    hold this process.

    The result is at most the part of one of `workers` that share the whole memory: those that start
    together all see the same free memory. `root` has the groups' folders, `membership` names those
    of this process.
    """
    groups = set(_memory_groups(root, membership))
    bounds = [_machine_memory(), *filter(None, map(_group_memory, groups))]
    total, free = min(bound[0] for bound in bounds), min(bound[1] for bound in bounds)
    return max(0, min(free, total // max(1, workers)))


def _memory_groups(root: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of the process's memory groups (version 1 or 2) and of all their parents.
    A container sees its own group as the root."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        lines = []
    for _, controllers, path in [*lines, ("", "", "/")]:
        folder = root / "memory" if controllers == "memory" else root
        if controllers in {"", "memory"}:
            group = folder / path.strip("/")
            yield group
            yield from (parent for parent in group.parents if parent.is_relative_to(folder))


def _group_memory(group: Path) -> tuple[int, int] | None:
    """Return a group's limit and what it may still use; None for a group without a limit."""
    for limit, used, cache in GROUP_FILES:
        try:
            total = int((group / limit).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            unused_cache = int(stat[cache])  # the kernel drops this cache on demand
            return total, total - int((group / used).read_text()) + unused_cache
        except (OSError, ValueError, KeyError):  # another version, or "max"
            continue
    return None


def _machine_memory() -> tuple[int, int]:
    """Return the machine's memory and what of it is available."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return total, int(line.split()[1]) * 1024
    except OSError:
        pass
    return total, total // 2
