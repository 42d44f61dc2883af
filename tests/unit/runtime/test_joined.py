"""Two commands of one deployment's name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo.runtime.control import Control
from dynamo.runtime.deployment import Deployment, ProcessRecord
from dynamo.runtime.pids import start_ticks

ANY = cast("Any", None)


async def test_the_second_says_what_it_joins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = Deployment("shop", tmp_path / "dynamo" / "shop")
    deployment.prepare()
    first, second = Control(ANY, deployment.folder), Control(ANY, deployment.folder)
    await first.start()
    assert not caplog.records
    other = await asyncio.create_subprocess_exec("sleep", "60")
    deployment.write(
        ProcessRecord(
            deployment="shop",
            role="supervisor",
            name="supervisor",
            pid=other.pid,
            start_ticks=start_ticks(other.pid),
            address="http://127.0.0.1:8000",
            instance="first",
        )
    )
    await second.start()
    (told,) = cast("list[Any]", caplog.records)
    assert "joined" in told.message
    url = "http://127.0.0.1:8000"
    assert told.fields == {"deployment": "shop", "pid": other.pid, "url": url}
    other.kill()
    await other.wait()
    await second.stop()
    await first.stop()
