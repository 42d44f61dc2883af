"""Opens engines by name. The table of engines is `ENGINES` in `core/plugins.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.plugins import ENGINES
from dynamo.core.reply import Engine
from dynamo.core.settings import Settings
from dynamo.inference.data_parallel import DataParallelEngine
from dynamo.models.grammar.matcher import GrammarCompiler

if TYPE_CHECKING:
    from dynamo.inference.native.weight_peers import WeightPeers
    from dynamo.models.card import ModelCard
    from dynamo.models.resolve import ModelFiles
    from dynamo.runtime.shared_memory import SharedMemoryClient


class EngineInputs(msgspec.Struct, frozen=True):
    """The arguments of every engine factory. `memory_bytes` is what the engine may use, 0 where
    nobody has measured it. `shared_memory` is what processes of a supervisor share,
    `weight_peers` where weights are read from processes of others."""

    settings: Settings
    card: ModelCard
    files: ModelFiles
    clock: Clock
    memory_bytes: int = 0
    shared_memory: SharedMemoryClient | None = None
    weight_peers: WeightPeers | None = None

    def grammar_compiler(self) -> GrammarCompiler:
        """Return what enforces structured outputs for the model's tokenizer."""
        return GrammarCompiler(Path(self.card.tokenizer_file.path), self.card.eos_token_ids)


async def open_engine(kind: str, inputs: EngineInputs) -> Engine:
    """Return an engine that is not started yet, with the data-parallel ranks of the settings.
    These share the memory equally. A class in place of a factory is that of one engine with all
    ranks. Raises `Unsupported`, `ConfigError` or `ModelUnavailable`."""
    make = ENGINES.load(kind)
    if isinstance(make, type):
        engine: Engine = make(inputs)
        return engine
    ranks = inputs.settings.engine.data_parallel_size
    inputs = replace(inputs, memory_bytes=inputs.memory_bytes // ranks)
    engines = [await make(inputs) for _ in range(ranks)]
    return engines[0] if len(engines) == 1 else DataParallelEngine(engines)
