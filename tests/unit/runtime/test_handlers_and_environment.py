"""The first steps of a user's own program: settings of the environment, and refused handlers."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.processes import Open

from dynamo.core.errors import ConfigError
from dynamo.runtime import DistributedRuntime

REFERENCE = "dynamo.Processor.chat/completions"


async def count_to(request: int) -> AsyncGenerator[int, None]:
    for number in range(request):
        yield number


async def without_parameters() -> None: ...


async def generator_with_writer(payload: bytes, writer: Any) -> Any:
    yield payload


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (without_parameters, r"must take \(payload, writer\)"),
        (generator_with_writer, "async generator"),
        ("handler", "cannot be called"),
    ],
)
async def test_a_handler_of_the_wrong_shape_is_refused_when_it_is_given(
    open_runtime: Open, handler: Any, message: str
) -> None:
    runtime = await open_runtime()
    with pytest.raises(ConfigError, match=message):
        await runtime.endpoint(REFERENCE).serve(handler)
    with pytest.raises(ConfigError, match=r"\(request\)|cannot be called"):
        await runtime.endpoint(REFERENCE).serve_items(
            generator_with_writer if callable(handler) else handler
        )
    await runtime.endpoint(REFERENCE).serve_items(count_to)


async def test_a_runtime_without_settings_reads_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tmp_path / "dynamo.yaml"
    config.write_text("runtime:\n  namespace: from-file\n  requests: 'memory:'\n")
    monkeypatch.setenv("DYNAMO_CONFIG_PATH", str(config))
    monkeypatch.setenv("DYNAMO_RUNTIME__DISCOVERY", "memory:from-environment")
    monkeypatch.setenv("DYNAMO_RUNTIME__EVENTS", "memory:")
    with caplog.at_level(logging.INFO):
        async with await DistributedRuntime.create() as runtime:
            assert runtime.settings.runtime.namespace == "from-file"
            assert runtime.planes.discovery == "memory:from-environment"
    assert "runtime opened its planes" in caplog.text
