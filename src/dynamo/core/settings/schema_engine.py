"""The section `engine`: the engines of workers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo.core.plugins import ENGINES
from dynamo.core.settings.declare import setting


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine of each worker."""

    kind: Annotated[
        str,
        setting(
            "engine of the workers: native, mock, echo, or an entry point in dynamo.engines",
            aliases=("model.engine",),
            not_yet=tuple((kind, "") for kind in ENGINES.planned),
        ),
    ] = "native"
    workers: Annotated[int, setting("worker processes", flag="--workers", ge=0)] = 1
    labels: Annotated[
        str,
        setting(
            "labels for the header x-dynamo-labels of requests, e.g. zone=a,gpu=h100",
            flag="--worker-labels",
        ),
    ] = ""
    num_blocks: Annotated[
        int,
        setting(
            "KV cache blocks; 0: the engine decides (mock 16,384; native by memory)",
            flag="--num-blocks",
            unit="blocks",
            ge=0,
        ),
    ] = 0
    block_size: Annotated[
        int,
        setting(
            "tokens in one KV block",
            flag="--block-size",
            unit="tokens",
            ge=1,
            le=1024,
            aliases=("model.block_size", "cache.block_size"),
        ),
    ] = 16
    data_parallel_size: Annotated[
        int,
        setting(
            "data-parallel ranks in one worker; each has its own blocks, sequences and steps, and "
            "routers choose among them",
            flag="--data-parallel-size",
            ge=1,
        ),
    ] = 1
    max_num_seqs: Annotated[
        int,
        setting(
            "sequences in one batch; 0: the engine's default",
            flag="--max-num-seqs",
            ge=0,
            aliases=("model.max_num_seqs",),
        ),
    ] = 0
    max_num_batched_tokens: Annotated[
        int,
        setting(
            "tokens computed in one step; 0: the engine's default",
            flag="--max-num-batched-tokens",
            unit="tokens",
            ge=0,
            aliases=("model.max_num_batched_tokens",),
        ),
    ] = 0
    prefix_caching: Annotated[
        bool,
        setting(
            "reuse blocks of earlier prompts",
            aliases=("model.enable_prefix_caching", "cache.enable_prefix_caching"),
        ),
    ] = True
    eviction: Annotated[
        str,
        setting(
            "order of eviction: lru, or reuse, which keeps blocks longer that several requests "
            "have used",
            flag="--eviction",
            choices=("reuse", "lru"),
            aliases=("cache.eviction",),
        ),
    ] = "reuse"
    threads: Annotated[
        int, setting("threads of one native worker; 0: all cores", flag="--threads", ge=0)
    ] = 0
    timing: Annotated[
        str,
        setting(
            "mock: `dynamo`, `constant:MS_PER_PROMPT_TOKEN,MS_PER_STEP`, or a JSON file",
            flag="--timing",
        ),
    ] = "dynamo"
    speedup_ratio: Annotated[
        float, setting("mock: divides modelled time", flag="--speedup-ratio", ge=1e-6)
    ] = 1.0
