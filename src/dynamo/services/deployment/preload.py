"""The process that a snapshot saves: it has loaded a model, and serves nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import sys

import msgspec

from dynamo.core.clock import SystemClock
from dynamo.core.errors import DynamoError
from dynamo.core.settings import Settings
from dynamo.inference.engine_registry import EngineInputs
from dynamo.inference.native.engine_sizing import available_memory_bytes
from dynamo.models.resolve import resolve_model_blocking
from dynamo.operations.snapshot.folder import PreloadAnswer
from dynamo.services.worker import make_card


def preload_model() -> None:
    """Load the model of the settings that standard input has, and say so on standard output. Both
    outputs are closed then, since their readers do not outlive this process."""
    data = b""
    while not data.endswith(b"\n") and (more := os.read(0, 1 << 16)):
        data += more
    settings = msgspec.json.decode(data, type=Settings)
    answer = PreloadAnswer()
    try:
        asyncio.run(_load(settings))
    except DynamoError as error:
        answer = PreloadAnswer(error.message, error.hint)
    gc.collect()
    _end_library_threads()
    os.write(1, msgspec.json.encode(answer))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
    if answer.error:
        sys.exit(1)


def _end_library_threads() -> None:
    """Fork once: OpenBLAS ends its threads before a fork, and starts them with its next work."""
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)


async def _load(settings: Settings) -> None:
    """Load what workers of these settings find loaded: the native engine's weights. Of other
    engines that is the code alone."""
    if settings.engine.kind != "native":
        return
    from dynamo.inference.torch.engine import preload

    files = resolve_model_blocking(settings.model.path)
    memory_bytes = settings.model.memory or available_memory_bytes(settings.worker_count)
    inputs = EngineInputs(settings, make_card(files, settings), files, SystemClock(), memory_bytes)
    await preload(inputs)
