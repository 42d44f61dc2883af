"""What an instance's engine says of itself, and of each of its data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from dynamo.core.values import EngineInfo
from dynamo.runtime.calls.instances import Instance


def engine_info(instance: Instance) -> EngineInfo | None:
    """What the instance's engine says of itself, if it does."""
    about = instance.capabilities.get("engine")
    return msgspec.convert(about, EngineInfo) if isinstance(about, dict) else None


def per_rank_engine_info(info: EngineInfo) -> EngineInfo:
    """One rank's part."""
    ranks = info.data_parallel
    blocks, places = info.num_blocks // ranks, info.max_num_seqs // ranks
    return replace(info, num_blocks=blocks, max_num_seqs=max(1, places), data_parallel=1)


def data_parallel_ranks(instance: Instance) -> Iterator[int | None]:
    """Its data-parallel ranks; None: it has but one."""
    about = instance.capabilities.get("engine")
    ranks = about.get("data_parallel", 1) if isinstance(about, dict) else 1
    return iter(range(ranks)) if ranks > 1 else iter((None,))
