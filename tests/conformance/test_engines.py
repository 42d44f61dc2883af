"""The engine suite over every built-in engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.inference_native.conftest import write_tiny_llama

from dynamo.core.clock import SystemClock
from dynamo.core.reply import Engine
from dynamo.core.settings.schema_engine import EngineSettings as EngineSettings
from dynamo.inference.data_parallel import DataParallelEngine
from dynamo.inference.echo import EchoEngine
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.llamacpp.engine import LlamaCppEngine
from dynamo.inference.llamacpp.server import ServerSizes
from dynamo.inference.mock.engine import make_mock_engine
from dynamo.inference.native.runner import NativeRunner
from dynamo.models.checkpoint.weights import open_weights
from dynamo.models.downloads.wheel_models import fetch_wheel_model
from dynamo_conformance.engines import EngineConformance

FEW_BLOCKS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), tied=True)


async def started(engine: Engine) -> AsyncIterator[Engine]:
    await engine.start()
    yield engine
    await engine.stop()


def mock() -> BatchedEngine:
    settings = EngineSettings(
        kind="mock", num_blocks=FEW_BLOCKS, block_size=4, speedup_ratio=1e6, max_num_seqs=4
    )
    return make_mock_engine(
        settings, range(3, 90), SystemClock(), context_tokens=90, vocab_size=100
    )


class TestEcho(EngineConformance):
    @pytest.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        async for engine in started(EchoEngine(context_tokens=90, vocab_size=100)):
            yield engine


class TestMock(EngineConformance):
    @pytest.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        async for engine in started(mock()):
            yield engine


class TestDataParallel(EngineConformance):
    @pytest.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        async for engine in started(DataParallelEngine([mock(), mock()])):
            yield engine


class TestNative(EngineConformance):
    @pytest.fixture
    async def engine(self, folder: Path) -> AsyncIterator[Engine]:
        settings = EngineSettings(
            num_blocks=FEW_BLOCKS, block_size=4, threads=2, max_num_batched_tokens=16
        )
        runner = NativeRunner(lambda: open_weights(folder), settings)
        async for engine in started(BatchedEngine(runner)):
            yield engine


class TestLlamaCpp(EngineConformance):
    @pytest.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        path = fetch_wheel_model()
        sizes = ServerSizes(slots=4, context_tokens=256)
        async for engine in started(LlamaCppEngine(path, sizes, vocab_size=49152)):
            yield engine
