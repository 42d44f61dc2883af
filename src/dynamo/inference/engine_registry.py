"""Opens engines by name. The table of engines is `ENGINES` in `core/plugins.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.plugins import ENGINES
from dynamo.core.reply import Engine
from dynamo.core.settings import Settings
from dynamo.inference.data_parallel import DataParallelEngine

if TYPE_CHECKING:
    from dynamo.models.card import ModelCard
    from dynamo.models.resolve import ModelFiles


class EngineInputs(msgspec.Struct, frozen=True):
    """The arguments of every engine factory."""

    settings: Settings
    card: ModelCard
    files: ModelFiles
    clock: Clock


EngineFactory = Callable[[EngineInputs], Awaitable[Engine]]


async def open_engine(kind: str, inputs: EngineInputs) -> Engine:
    """Return an engine that is not started yet, with the data-parallel ranks of the settings.
    Raises `Unsupported`, `ConfigError` or `ModelUnavailable`."""
    make: EngineFactory = ENGINES.load(kind)
    ranks = inputs.settings.engine.data_parallel_size
    if ranks == 1:
        return await make(inputs)
    return DataParallelEngine([await make(inputs) for _ in range(ranks)])
