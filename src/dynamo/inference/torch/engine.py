"""Opens the native engine: NumPy's runner, or torch's where the settings or a card ask for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dynamo.core.errors import ConfigError, Unsupported
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.engines.arguments import engine_environment
from dynamo.inference.eviction import make_eviction_policy
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.tiers.opening import tier_opener
from dynamo.inference.torch.device import TorchDevice, choose_device

if TYPE_CHECKING:
    from dynamo.core.settings.schema_cache import CacheSettings
    from dynamo.core.settings.schema_engine import EngineSettings
    from dynamo.inference.engine_registry import EngineInputs
    from dynamo.inference.model_runner import ModelRunner
    from dynamo.models.checkpoint.decoder_config import DecoderConfig


def check_ranks(
    config: DecoderConfig,
    settings: EngineSettings,
    cache: CacheSettings,
    device: TorchDevice | None,
) -> None:
    """Raise `ConfigError` if so many devices cannot share the model, or are not there."""
    size = settings.tensor_parallel_size
    if device is None:
        raise _error(size, "NumPy computes on the CPU, in one process", "use --device cpu or cuda")
    counts = {
        "query heads": config.num_heads,
        "KV heads": config.num_kv_heads,
        "columns of the MLP": config.intermediate_size,
    }
    if odd := [f"{count} {name}" for name, count in counts.items() if count % size]:
        sizes = [n for n in range(1, size) if not any(count % n for count in counts.values())]
        raise _error(
            size, f"it does not divide the model's {' and '.join(odd)}", f"use {sizes[-1]}"
        )
    if device.name != "cpu":
        import torch

        if (cards := torch.cuda.device_count()) < size:
            visible = "1 card is" if cards == 1 else f"{cards} cards are"
            raise _error(size, f"{visible} visible", f"use {cards}, or name more in --device-ids")
    reasons = {
        "norms over all heads (OLMo-2) are not divided": config.qk_norm == "all",
        "data-parallel ranks share one process": settings.data_parallel_size > 1,
        "workers of several devices exchange no KV blocks": settings.role != "both",
        f"no tier ({', '.join(cache.tiers)}) takes the blocks of several devices": cache.tiers,
    }
    for reason, applies in reasons.items():
        if applies:
            raise _error(size, reason, "use 1, or serve by --engine.kind vllm")


def _error(size: int, reason: str, hint: str) -> ConfigError:
    param = "engine.tensor_parallel_size"
    return ConfigError(f"{param} is {size}, and {reason}", hint=hint, param=param)


async def open_engine(inputs: EngineInputs) -> BatchedEngine:
    """Create the engine. The model's weights are read when it starts. Raises `ConfigError`."""
    settings, cache = inputs.settings.engine, inputs.settings.cache
    os.environ.update(engine_environment(inputs.settings))  # before torch looks for cards
    return BatchedEngine(
        _make_runner(inputs, choose_device(settings)),
        eos_token_ids=inputs.card.eos_token_ids,
        prefix_caching=settings.prefix_caching,
        eviction=make_eviction_policy(settings.eviction),
        open_tiers=tier_opener(cache, settings, inputs.clock),
        grammars=inputs.grammar_compiler(),
    )


async def preload(inputs: EngineInputs) -> None:
    """Prepare weights for workers that are forked from this process later. No thread and no event
    loop keeps running. Raises `Unsupported` on a card, and `ModelUnavailable`."""
    from dynamo.inference.native.shared_weights import PRELOADED, PreloadedMemory

    if choose_device(inputs.settings.engine) is not None:
        raise Unsupported("weights of PyTorch are not saved", hint="leave out --device and --dtype")
    memory = PreloadedMemory()
    runner = _make_native_runner(replace(inputs, shared_memory=memory))
    await runner.start()
    await runner.stop()
    if runner.shared_weights is not None and memory.fd >= 0:
        PRELOADED[runner.shared_weights.content_key()] = memory.fd


def _make_native_runner(inputs: EngineInputs) -> NativeRunner:
    from dynamo.inference.native.shared_weights import shared_weights

    return NativeRunner(
        inputs.files.open_weights,
        inputs.settings.engine,
        context_tokens=inputs.card.context_tokens,
        memory_bytes=inputs.memory_bytes,
        cache=inputs.settings.cache,
        shared_weights=shared_weights(inputs.shared_memory, inputs.files.path, inputs.weight_peers),
    )


def _make_runner(inputs: EngineInputs, device: TorchDevice | None) -> ModelRunner:
    open_weights, settings = inputs.files.open_weights, inputs.settings.engine
    context_tokens, memory_bytes = inputs.card.context_tokens, inputs.memory_bytes
    cache = inputs.settings.cache
    if settings.tensor_parallel_size > 1:
        with open_weights() as weights:
            check_ranks(weights.config, settings, cache, device)
        from dynamo.inference.torch.tensor_parallel import TensorParallelRunner

        assert device is not None  # noqa: S101 - `check_ranks`
        return TensorParallelRunner(
            open_weights,
            settings,
            device,
            context_tokens=context_tokens,
            memory_bytes=memory_bytes,
        )
    if device is None:
        return _make_native_runner(inputs)
    from dynamo.inference.torch.runner import TorchRunner

    return TorchRunner(
        open_weights,
        settings,
        device,
        context_tokens=context_tokens,
        memory_bytes=memory_bytes,
        cache=cache,
    )
