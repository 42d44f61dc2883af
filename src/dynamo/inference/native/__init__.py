"""The native engine: Llama-shaped models in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo.inference.engine import BatchedEngine
    from dynamo.inference.engine_registry import EngineInputs


async def open_engine(inputs: EngineInputs) -> BatchedEngine:
    """Create the engine. The model's weights are read when it starts."""
    from dynamo.inference.engine import BatchedEngine
    from dynamo.inference.eviction import make_eviction_policy
    from dynamo.inference.native.runner import NativeRunner

    settings = inputs.settings.engine
    runner = NativeRunner(
        inputs.files.open_weights, settings, context_tokens=inputs.card.context_tokens
    )
    return BatchedEngine(
        runner,
        eos_token_ids=inputs.card.eos_token_ids,
        prefix_caching=settings.prefix_caching,
        eviction=make_eviction_policy(settings.eviction),
    )
