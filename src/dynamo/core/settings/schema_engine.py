"""The section `engine`: the engines of workers."""

from __future__ import annotations

from dynamo.core.plugins import ENGINES
from dynamo.core.settings.declare import SettingsSection, setting


class EngineSettings(SettingsSection, frozen=True):
    """The engine of each worker."""

    kind: str = setting(
        "native",
        "engine of the workers: native, mock, echo, or an entry point in dynamo.engines",
        aliases=("model.engine",),
        not_yet=tuple((kind, "") for kind in ENGINES.planned),
    )
    workers: int = setting(1, "worker processes", flag="--workers", ge=0)
    role: str = setting(
        "both",
        "what the workers compute: prompts for other workers (prefill), answers (decode), or both; "
        "`dynamo roles` changes it while a worker serves",
        flag="--role",
        choices=("both", "prefill", "decode"),
    )
    labels: str = setting(
        "",
        "labels for the header x-dynamo-labels of requests, e.g. zone=a,gpu=h100",
        flag="--worker-labels",
    )
    num_blocks: int = setting(
        0,
        "KV cache blocks; 0: the engine decides (mock 16,384; native by memory)",
        flag="--num-blocks",
        unit="blocks",
        ge=0,
    )
    block_size: int = setting(
        16,
        "tokens in one KV block",
        flag="--block-size",
        unit="tokens",
        ge=1,
        le=1024,
        aliases=("model.block_size", "cache.block_size"),
    )
    data_parallel_size: int = setting(
        1,
        "data-parallel ranks in one worker; each has its own blocks, sequences and steps, and "
        "routers choose among them",
        flag="--data-parallel-size",
        ge=1,
    )
    max_num_seqs: int = setting(
        0,
        "sequences in one batch; 0: the engine's default",
        flag="--max-num-seqs",
        ge=0,
        aliases=("model.max_num_seqs",),
    )
    max_num_batched_tokens: int = setting(
        0,
        "tokens computed in one step; 0: the engine's default",
        flag="--max-num-batched-tokens",
        unit="tokens",
        ge=0,
        aliases=("model.max_num_batched_tokens",),
    )
    prefix_caching: bool = setting(
        True,
        "reuse blocks of earlier prompts",
        aliases=("model.enable_prefix_caching", "cache.enable_prefix_caching"),
    )
    share_cache: bool = setting(
        False,
        "share cached prompts among the API keys; otherwise each of several keys has its own, so "
        "that no client learns what others asked",
    )
    eviction: str = setting(
        "reuse",
        "order of eviction: lru, or reuse, which keeps blocks longer that several requests "
        "have used",
        flag="--eviction",
        choices=("reuse", "lru"),
        aliases=("cache.eviction",),
    )
    threads: int = setting(0, "threads of one native worker; 0: all cores", flag="--threads", ge=0)
    timing: str = setting(
        "dynamo",
        "mock: `dynamo`, `constant:MS_PER_PROMPT_TOKEN,MS_PER_STEP`, or a JSON file",
        flag="--timing",
    )
    speedup_ratio: float = setting(
        1.0, "mock: divides modelled time", flag="--speedup-ratio", ge=1e-6
    )
