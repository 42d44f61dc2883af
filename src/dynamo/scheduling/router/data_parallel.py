"""The engine description in an instance's capabilities, whole and for each data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from dynamo.core.values import EngineInfo
from dynamo.runtime.calls.instances import Instance


def engine_info(instance: Instance) -> EngineInfo | None:
    """Return the engine description that the instance announced, if any."""
    capability = instance.capabilities.get("engine")
    return msgspec.convert(capability, EngineInfo) if isinstance(capability, dict) else None


def per_rank_engine_info(info: EngineInfo) -> EngineInfo:
    """Return one rank's share of blocks and sequence slots."""
    ranks = info.data_parallel
    blocks, slots = info.num_blocks // ranks, info.max_num_seqs // ranks
    return replace(info, num_blocks=blocks, max_num_seqs=max(1, slots), data_parallel=1)


def data_parallel_ranks(instance: Instance) -> Iterator[int | None]:
    """Return the ranks of the instance; a single None for an instance without ranks."""
    capability = instance.capabilities.get("engine")
    ranks = capability.get("data_parallel", 1) if isinstance(capability, dict) else 1
    return iter(range(ranks)) if ranks > 1 else iter((None,))
