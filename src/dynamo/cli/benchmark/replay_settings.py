"""The settings of a replay, as its result tells them."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynamo.core.settings import Settings

if TYPE_CHECKING:
    from dynamo.core.settings.schema_router import RouterSettings
    from dynamo.operations.replay.workers import ReplayWorkers


def summarize_settings(
    args: argparse.Namespace, settings: Settings, workers: ReplayWorkers
) -> dict[str, object]:
    """Return the settings of arrivals and workers for the result."""
    engine, info = settings.engine, workers.groups[-1].engine
    return {
        "workers": workers.count,
        "data_parallel_size": engine.data_parallel_size,
        "lockstep": args.lockstep or None,
        "eviction": engine.eviction,
        "prefix_caching": engine.prefix_caching,
        "timing": engine.timing,
        **_roles_summary(args, settings, workers),
        **_tiers_summary(args, workers),
        "speed": args.speed,
        "smear_s": args.smear,
        "rows": args.rows or None,
        "trace_block_size": args.trace_block_size,
        "seed": args.seed,
        "events": Path(args.events).name if args.events else None,
        "startup_s": list(msgspec.structs.astuple(args.startup)) if args.startup else None,
        "num_blocks": info.num_blocks,
        "block_size": info.block_tokens,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "context_tokens": settings.model.context_tokens or None,
    }


def _roles_summary(
    args: argparse.Namespace, settings: Settings, workers: ReplayWorkers
) -> dict[str, object]:
    """Return the settings of workers that compute prompts for others; empty without such."""
    if workers.transfer is None:
        return {}
    counts = Counter({"prefill_workers": 0, "decode_workers": 0, "flexible_workers": 0})
    for group in workers:
        roles = group.engine.roles
        counts[f"{roles[0] if len(roles) == 1 else 'flexible'}_workers"] += 1
    return {
        **counts,
        "disagg": settings.router.disaggregation.mode,
        "itl_slo_ms": settings.router.disaggregation.itl_slo or None,
        "prefill_timing": args.prefill_timing or settings.engine.timing,
        "kv_bytes_per_token": args.kv_bytes_per_token,
        "transfer_gbps": args.transfer_gbps,
    }


def _tiers_summary(args: argparse.Namespace, workers: ReplayWorkers) -> dict[str, object]:
    """Return the settings of the tiers; empty without any."""
    summary: dict[str, object] = {}
    for tier in workers.tiers:
        summary |= {f"{tier.name}_blocks": tier.blocks, f"{tier.name}_gbps": tier.bytes_per_s / 1e9}
    return summary | {"kv_bytes_per_token": args.kv_bytes_per_token} if summary else {}


def summarize_router(routing: RouterSettings) -> dict[str, object]:
    """Return the router settings for the result; None stands for a limit that is not set."""
    bounded = routing.queue_bound != sys.maxsize
    wait_s = routing.max_queue_wait
    return {
        "router_mode": routing.mode,
        "router_policy": routing.policy if routing.mode == "kv" else "",
        "router_selector": routing.selector,
        "router_temperature": routing.temperature,
        "router_queue_threshold": routing.queue_threshold,
        "router_queue_order": routing.queue_order,
        "router_queue_bound": routing.queue_bound if bounded else None,
        "routing_strategy": msgspec.to_builtins(routing.routing_strategy),
        "load_balancing_algorithm": routing.load_balancing.algorithm,
        "ttft_slo": routing.ttft_slo or None,
        "max_queue_wait": wait_s if wait_s < math.inf else None,
        "max_worker_requests": routing.max_worker_requests or None,
    }
