"""The section on what computes."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo.core.settings.declare import setting

UNSUPPORTED_ENGINES = ("vllm", "sglang", "trtllm", "tensorrt_llm", "llamacpp", "openai")


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The workers' engine."""

    kind: Annotated[
        str,
        setting(
            "engine of the workers: native, mock, echo, or an entry point in dynamo.engines",
            aliases=("model.engine",),
            not_yet=tuple((kind, "") for kind in UNSUPPORTED_ENGINES),
        ),
    ] = "native"
    workers: Annotated[int, setting("worker processes", flag="--workers", ge=0)] = 1
    labels: Annotated[
        str,
        setting(
            "what a request may ask for by its header x-dynamo-labels, e.g. zone=a,gpu=h100",
            flag="--worker-labels",
        ),
    ] = ""
    num_blocks: Annotated[
        int,
        setting(
            "KV cache blocks; 0: what the engine finds right (mock 16,384; native: by memory)",
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
            "engines in one worker (data-parallel ranks), each with blocks, sequences and steps of "
            "its own; routers choose among them",
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
            "keep finished blocks for later prompts",
            aliases=("model.enable_prefix_caching", "cache.enable_prefix_caching"),
        ),
    ] = True
    eviction: Annotated[
        str,
        setting(
            "which cached block is given up first: the least recently used, or that, with more "
            "time for what several requests have wanted (reuse)",
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
        float, setting("mock: modelled time is divided by this", flag="--speedup-ratio", ge=1e-6)
    ] = 1.0
