"""`run(MyEngine)`: the main function of a worker with a user's engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

from dynamo.common.backend.engine import BaseEngine
from dynamo.common.backend.worker import Worker, WorkerConfig
from dynamo.core.errors import DynamoError

EngineFactory = Callable[[list[str] | None], Awaitable[tuple[BaseEngine, WorkerConfig]]]


def run(
    engine_cls: type[BaseEngine],
    argv: list[str] | None = None,
    engine_factory: EngineFactory | None = None,
) -> None:
    """Serve an engine until the process is stopped. Exits with 1 and one line for an error of a
    setting, a model or a plane."""
    try:
        asyncio.run(_start(engine_factory or engine_cls.from_args, argv))
    except DynamoError as error:
        sys.exit(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))


async def _start(make: EngineFactory, argv: list[str] | None) -> None:
    await Worker(*await make(argv)).run()
