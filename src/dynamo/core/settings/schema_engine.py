"""The section `engine`: the engines of workers."""

from __future__ import annotations

from typing import Any

from dynamo.core.settings.declare import SettingsSection, setting

AUTO = "auto"
"""The kind of an engine that is chosen by the model, the machine and what is installed."""


class EngineSettings(SettingsSection, frozen=True):
    """The engine of each worker."""

    kind: str = setting(
        AUTO,
        "engine of the workers: auto (the first of native, llamacpp and vllm that serves the model "
        "here), native, vllm, llamacpp, openai, mock, echo, script, or an entry point in "
        "dynamo.engines",
        aliases=("model.engine",),
    )
    workers: int = setting(1, "worker processes", flag="--workers", ge=0)
    standby: int = setting(
        0,
        "processes of each kind of worker that have loaded the model, serve nothing, and take the "
        "place of one that dies",
        flag="--standby",
        ge=0,
        le=64,
    )
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
    tensor_parallel_size: int = setting(
        1,
        "devices that share every layer",
        flag="--tensor-parallel-size",
        ge=1,
        aliases=("model.tensor_parallel_size",),
    )
    pipeline_parallel_size: int = setting(
        1,
        "groups of devices that share the layers",
        flag="--pipeline-parallel-size",
        ge=1,
        aliases=("model.pipeline_parallel_size",),
    )
    device_ids: tuple[int, ...] = setting(
        (),
        "numbers of this host's accelerators, divided among the workers; empty: those of "
        "$CUDA_VISIBLE_DEVICES, else all, that no other deployment holds. Each worker gets as many "
        "as it needs; a number that is listed twice is shared",
        flag="--device-ids",
    )
    device: str = setting(
        "auto",
        "where the native engine computes: auto (a card that PyTorch can use, else the CPU by "
        "NumPy), cpu or cuda (by PyTorch)",
        flag="--device",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = setting(
        "auto",
        "number format of weights and KV blocks; auto: the engine's default (native: bfloat16 on a "
        "card that has it, float32 on a CPU)",
        flag="--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    gpu_memory_utilization: float = setting(
        0.0,
        "share of each accelerator's memory that the engine may use; 0: the engine's default",
        flag="--gpu-memory-utilization",
        unit="ratio",
        ge=0,
        le=1,
        aliases=("model.gpu_memory_utilization",),
    )
    swap_space: float = setting(
        0.0,
        "host memory for the KV cache of sequences that wait",
        unit="GiB",
        ge=0,
        aliases=("model.swap_space",),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "format of the KV cache; auto: that of the weights",
        flag="--kv-cache-dtype",
        choices=("auto", "fp8", "fp16"),
        aliases=("model.kv_cache_dtype",),
    )
    quantization: str | None = setting(
        None,
        "format of the weights, such as awq or gptq; unset: as the model's files say",
        flag="--quantization",
        aliases=("model.quantization",),
    )
    args: dict[str, Any] = setting(
        {},
        "arguments of the engine by the engine's own names, passed on as they are",
        flag="--engine-arg",
    )
    compile_cache: str = setting(
        "",
        "store for what vLLM and SGLang compile at a start, shared by all workers: a folder or "
        "s3://BUCKET/PREFIX. Who may write there runs code in the workers; empty: none",
        flag="--compile-cache",
    )
    lora_modules: tuple[str, ...] = setting(
        (),
        "LoRA adapters that each worker loads at its start: NAME=FOLDER or vLLM's JSON, or "
        "several; in a file also a mapping of names to folders",
        flag="--lora-modules",
        aliases=("model.adapters",),
        entries=r"(?!in=|out=)[^=/]+=.+|[{[].+",
    )
    lora_updates: bool = setting(
        False,
        "load and unload LoRA adapters while serving, by POST /v1/load_lora_adapter and "
        "/v1/unload_lora_adapter",
        flag="--allow-lora-updates",
    )
    urls: tuple[str, ...] = setting(
        (),
        "servers with an OpenAI API, for engine openai: each is one worker; `out=openai URL..` "
        "names them, too",
        flag="--urls",
    )
    url_model: str = setting(
        "", "name of the model at the servers, if they have several", flag="--url-model"
    )
    url_kv_events: tuple[str, ...] = setting(
        (),
        "where each of the servers publishes its KV events, in the order of `urls`: "
        "tcp://HOST:PORT or tcp://HOST:PORT/REPLAY_PORT; empty: routers predict their caches",
        flag="--url-kv-events",
    )
    url_key: str = setting("", "API key for the servers", secret=True)
    url_ca: str = setting("", "PEM file of the CA of https servers; unset: the system's CAs")
    max_num_seqs: int = setting(
        0,
        "sequences in one batch; 0: the engine's default",
        flag="--max-num-seqs",
        ge=0,
        tuned=(16, 32, 64, 128, 256, 512),
        aliases=("model.max_num_seqs",),
    )
    max_num_batched_tokens: int = setting(
        0,
        "tokens computed in one step; 0: the engine's default",
        flag="--max-num-batched-tokens",
        unit="tokens",
        ge=0,
        tuned=(512, 1024, 2048, 4096, 8192, 16384),
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
    startup: float = setting(
        0.0, "mock: time that a start takes", flag="--startup", unit="seconds", ge=0
    )
    script: str = setting(
        "",
        'script: file of JSON lines {"when": "text in the prompt", "text": "answer"}',
        flag="--script",
    )
    tokens_per_step: str = setting(
        "1", "script: tokens in a step, 1 or a range such as 1-8", flag="--tokens-per-step"
    )
