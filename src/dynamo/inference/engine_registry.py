"""Engines by name: a table of kind -> "module:function", loaded on first use."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError, Unsupported
from dynamo.core.reply import Engine
from dynamo.core.settings import Settings
from dynamo.inference.data_parallel import DataParallelEngine

if TYPE_CHECKING:
    from dynamo.models.card import ModelCard
    from dynamo.models.resolve import ModelFiles

ENGINES = {
    "native": "dynamo.inference.native:open_engine",
    "mock": "dynamo.inference.mock.engine:open_engine",
    "echo": "dynamo.inference.echo:open_engine",
}
PLANNED_ENGINES = ("vllm", "sglang", "trtllm", "llamacpp", "openai")


class EngineInputs(msgspec.Struct, frozen=True):
    """What an engine is made from."""

    settings: Settings
    card: ModelCard
    files: ModelFiles
    clock: Clock


EngineFactory = Callable[[EngineInputs], Awaitable[Engine]]


def check_engine_kind(kind: str) -> None:
    """Raises `Unsupported` for an engine that is planned, `ConfigError` for an unknown one."""
    if kind in PLANNED_ENGINES:
        raise Unsupported(
            f"out={kind}: this engine is not supported yet",
            hint=f"engines that work today: {', '.join(ENGINES)}",
        )
    if kind not in ENGINES:
        near = difflib.get_close_matches(kind, ENGINES, n=1)
        raise ConfigError(
            f"unknown engine {kind!r}",
            hint=f"did you mean {near[0]}?" if near else f"known: {', '.join(ENGINES)}",
        )


async def open_engine(kind: str, inputs: EngineInputs) -> Engine:
    """An engine of this kind, not started yet; of as many ranks as the settings say. Raises as
    `check_kind`, and `ModelUnavailable`."""
    check_engine_kind(kind)
    module, _, name = ENGINES[kind].partition(":")
    make: EngineFactory = getattr(import_module(module), name)
    ranks = inputs.settings.engine.data_parallel_size
    if ranks == 1:
        return await make(inputs)
    return DataParallelEngine([await make(inputs) for _ in range(ranks)])
