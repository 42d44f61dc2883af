"""The engine suite over adapters of foreign engines, with fakes of these engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support import fake_trtllm
from tests.support.external_inputs import install_module, make_inputs
from tests.support.fake_sglang import FakeSglang

from dynamo.core.errors import Unsupported
from dynamo.core.reply import Engine
from dynamo.inference.sglang.engine import SglangEngine
from dynamo.inference.trtllm.engine import TrtllmEngine
from dynamo_conformance.engines import (
    EngineConformance,
    EventView,
    generate_reply,
    make_request,
    settle,
)


async def started(engine: Engine) -> AsyncIterator[Engine]:
    await engine.start()
    yield engine
    await engine.stop()


class TestSglang(EngineConformance):
    @pytest.fixture(params=[True, False], ids=["new ids", "all ids"])
    async def engine(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Engine]:
        install_module(monkeypatch, "sglang", Engine=FakeSglang)
        arguments = {"incremental_streaming_output": request.param}
        async for engine in started(SglangEngine(make_inputs("sglang", tmp_path, args=arguments))):
            yield engine


class TestTrtllm(EngineConformance):
    @pytest.fixture
    async def engine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Engine]:
        fake_trtllm.install(monkeypatch)
        async for engine in started(TrtllmEngine(make_inputs("trtllm", tmp_path))):
            yield engine

    async def test_clear_blocks_empties_every_rank_at_once(self, engine: Engine) -> None:
        with pytest.raises(Unsupported, match="cannot empty its prefix cache"):
            await engine.clear_blocks()

    async def test_each_rank_answers_and_reports_its_own_blocks(self, engine: Engine) -> None:
        (view,) = [EventView(rank) for rank in engine.ranks]
        await generate_reply(engine, make_request())
        await settle(lambda: bool(view.blocks))
        await view.assert_matches_snapshot()
        assert view.blocks
