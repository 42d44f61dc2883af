"""Builds the mock engine: real scheduling, modelled step times, generated tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo.communication.transfer.region import MAX_SLOTS
from dynamo.core.clock import Clock
from dynamo.core.settings.schema_cache import NO_TIERS, CacheSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.timing.model import parse_timing
from dynamo.core.values import EngineInfo
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.engines.lora_adapters import FolderAdapters
from dynamo.inference.eviction import make_eviction_policy
from dynamo.inference.mock.runner import SLOT_BYTES, MockRunner
from dynamo.inference.tiers.opening import plan_host_blocks, tier_opener
from dynamo.models.grammar.matcher import GrammarCompiler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo.inference.engine_registry import EngineInputs

KV_BYTES_PER_TOKEN = 131_072
"""The size that a token's KV is taken to have in sizes of caches, as in replays."""
DEFAULT_NUM_BLOCKS = 16_384
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 8_192
DEFAULT_MAX_TOKENS = 1024.0
"""The length of a simulated answer, which never ends by itself, if the request has no limit."""


def make_mock_engine(
    settings: EngineSettings,
    vocabulary: Sequence[int],
    clock: Clock,
    *,
    context_tokens: int,
    vocab_size: int = 0,
    layout: str = "",
    cache: CacheSettings = NO_TIERS,
    memory_bytes: int = 0,
    grammars: GrammarCompiler | None = None,
    has_adapters: bool = False,
) -> BatchedEngine:
    """Return a mock engine that generates ids of `vocabulary`. With a `layout`, peers may read
    digests of its blocks, and `cache` can name tiers. `memory_bytes` is what these digests may
    take; 0: unknown. `has_adapters`: also without settings about LoRA adapters. Raises
    `ConfigError` for a wrong timing, and for tiers that cannot work."""
    ranks, block_bytes = settings.data_parallel_size, settings.block_size * KV_BYTES_PER_TOKEN
    info = make_mock_engine_info(
        settings,
        context_tokens=context_tokens,
        vocab_size=vocab_size,
        max_blocks=cache.max_cache_size // ranks // block_bytes,
    )
    free_blocks = memory_bytes // SLOT_BYTES if memory_bytes else MAX_SLOTS
    free_bytes = min(free_blocks, MAX_SLOTS - info.num_blocks) * block_bytes
    adapts = has_adapters or settings.lora_updates or settings.lora_modules
    runner = MockRunner(
        info,
        vocabulary,
        parse_timing(settings.timing),
        clock,
        speedup_ratio=settings.speedup_ratio,
        layout=layout,
        host_blocks=plan_host_blocks(cache, ranks, info.num_blocks, block_bytes, free_bytes),
    )
    return BatchedEngine(
        runner,
        hits_from="scheduled",
        prefix_caching=settings.prefix_caching,
        eviction=make_eviction_policy(settings.eviction),
        open_tiers=tier_opener(cache, settings, clock, block_bytes),
        grammars=grammars,
        adapters=FolderAdapters(settings.lora_modules) if adapts else None,
    )


def make_mock_engine_info(
    settings: EngineSettings, *, context_tokens: int, vocab_size: int = 0, max_blocks: int = 0
) -> EngineInfo:
    """Return the `EngineInfo` of a mock engine with these settings. `max_blocks`: its blocks if the
    settings do not name their number; 0: the default."""
    num_blocks = settings.num_blocks or max_blocks or DEFAULT_NUM_BLOCKS
    return EngineInfo(
        engine="mock",
        block_tokens=settings.block_size,
        num_blocks=num_blocks,
        context_tokens=min(context_tokens, num_blocks * settings.block_size),
        max_num_seqs=settings.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
        max_num_batched_tokens=settings.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS,
        vocab_size=vocab_size,
        prefix_caching=settings.prefix_caching,
        sampling={"max_tokens": DEFAULT_MAX_TOKENS},
    )


async def open_engine(inputs: EngineInputs) -> BatchedEngine:
    """Create the engine from the settings and the model's tokenizer. Weights are not needed."""
    from dynamo.models.tokenization.tokenizer import read_text_token_ids

    await inputs.clock.sleep(inputs.settings.engine.startup)
    vocabulary = await inputs.clock.offload(read_text_token_ids, inputs.card.tokenizer_file)
    return make_mock_engine(
        inputs.settings.engine,
        vocabulary,
        inputs.clock,
        context_tokens=inputs.card.context_tokens,
        vocab_size=inputs.card.vocab_size,
        layout=f"mock-2 {inputs.card.name} {inputs.settings.engine.block_size} "
        f"{inputs.card.tokenizer_file.sha256}",
        cache=inputs.settings.cache,
        memory_bytes=inputs.memory_bytes,
        grammars=inputs.grammar_compiler(),
        has_adapters=True,
    )
