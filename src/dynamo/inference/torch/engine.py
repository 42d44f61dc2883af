"""Opens the native engine: NumPy's runner, or torch's where the settings or a card ask for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dynamo.core.errors import Unsupported
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.engines.arguments import engine_environment
from dynamo.inference.eviction import make_eviction_policy
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.tiers.opening import tier_opener
from dynamo.inference.torch.device import choose_device
from dynamo.inference.torch.ranks import check_ranks

if TYPE_CHECKING:
    from dynamo.inference.engine_registry import EngineInputs
    from dynamo.inference.model_runner import ModelRunner
    from dynamo.inference.torch.device import TorchDevice


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
