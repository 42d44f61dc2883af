"""The engine description in an instance's capabilities, whole and for each data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from dynamo.core.kv_events import worker_name
from dynamo.core.values import EngineInfo
from dynamo.runtime.calls.instances import Instance

DEFAULT_TOKEN_BYTES = 131_072.0
"""Size of a token's KV in a model of 8 billion parameters."""

INITIAL_TRANSFER_BYTES_PER_S = 8e9
"""Rate at which a worker gets KV of others until its first report names another one."""

NO_RANKS = (None,)


def engine_info(instance: Instance, rank: int | None = None) -> EngineInfo | None:
    """Return the engine description that the instance announced, if any that can be read. With a
    `rank`, return the share of one rank."""
    try:
        info = msgspec.convert(instance.capabilities.get("engine"), EngineInfo | None)
    except msgspec.ValidationError:
        info = None
    if info is None or rank is None:
        return info
    blocks, slots = info.num_blocks // info.data_parallel, info.max_num_seqs // info.data_parallel
    return replace(info, num_blocks=blocks, max_num_seqs=max(1, slots), data_parallel=1)


def predict_token_transfer_ms(instance: Instance, bytes_per_s: float) -> float:
    """Return the time to move a token's KV to the instance, by the size of the blocks in the memory
    that it exposes to other workers. 0 `bytes_per_s`: no rate is known."""
    capabilities = instance.capabilities
    try:
        slot_bytes = float(capabilities["transfer"][0]["slot_bytes"])
        token_bytes = slot_bytes / int(capabilities["engine"]["block_tokens"])
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        token_bytes = DEFAULT_TOKEN_BYTES
    return token_bytes / (bytes_per_s or INITIAL_TRANSFER_BYTES_PER_S) * 1e3


def data_parallel_ranks(instance: Instance) -> Sequence[int | None]:
    """Return the ranks of the instance; a single None for an instance without ranks."""
    capability = instance.capabilities.get("engine")
    ranks = capability.get("data_parallel", 1) if isinstance(capability, dict) else 1
    return range(ranks) if ranks > 1 else NO_RANKS


def list_workers(instances: Mapping[str, Instance]) -> dict[str, tuple[Instance, int | None]]:
    """Return worker name -> instance and rank, for each rank of all instances. The rank is None for
    an instance without ranks."""
    return {
        worker_name(name, rank): (instance, rank)
        for name, instance in instances.items()
        for rank in data_parallel_ranks(instance)
    }
