"""The fixture `start_worker`."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.unit.inference_disaggregation.workers import LiveWorker, StartWorker

from dynamo.core.clock import SystemClock
from dynamo.core.reply import Engine
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import EngineSettings, RuntimeSettings
from dynamo.inference.data_parallel import DataParallelEngine
from dynamo.inference.mock.engine import make_mock_engine
from dynamo.inference.worker import EngineWorker
from dynamo.models.card import ModelCard
from dynamo.models.file_cache import FileRef
from dynamo.runtime.distributed import DistributedRuntime

_numbers = count()


@pytest.fixture(params=["memory:"])
async def start_worker(
    tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[StartWorker]:
    """Return `start_worker(layout=..., ranks=..., engine=..., **engine settings)`. The engine is a
    mock engine unless one is given. The parameter is the URL of the transfer plane; with another
    one than `memory:`, calls go over TCP."""
    transfer: str = request.param
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"{}")
    sha256 = hashlib.sha256(b"{}").hexdigest()
    card = ModelCard(("m",), 4096, 1000, FileRef("tokenizer.json", sha256, 2, str(path)))
    discovery = f"memory:prefill-{next(_numbers)}"
    planes = RuntimeSettings(
        discovery=discovery,
        requests="memory:" if transfer == "memory:" else "tcp://127.0.0.1:0",
        events=discovery,
        transfer=transfer,
        namespace="unit",
    )
    async with AsyncExitStack() as stack:

        async def start(
            layout: str = "mock", ranks: int = 1, engine: Engine | None = None, **settings: Any
        ) -> LiveWorker:
            runtime = await DistributedRuntime.create(Settings(runtime=planes), role="worker")
            await stack.enter_async_context(runtime)
            engine_settings = EngineSettings(kind="mock", block_size=4, **settings)
            engines = [
                make_mock_engine(
                    engine_settings,
                    range(100, 900),
                    SystemClock(),
                    context_tokens=4096,
                    vocab_size=1000,
                    layout=layout,
                )
                for _ in range(0 if engine else ranks)
            ]
            if engine is None:
                engine = engines[0] if ranks == 1 else DataParallelEngine(engines)
            worker = EngineWorker(engine, card)
            await worker.attach(runtime)
            runtime.add_shutdown_hook(worker.close)
            return LiveWorker(runtime, worker, engines)

        yield start
