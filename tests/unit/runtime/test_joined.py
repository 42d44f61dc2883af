"""Two commands of one deployment's name."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo.runtime.deployment import Deployment, ProcessRecord
from dynamo.runtime.pids import start_ticks
from dynamo.runtime.processes.control import ControlRequest, ControlServer, send_control_request
from dynamo.runtime.processes.process_group import ProcessGroup

ANY = cast("Any", None)


class Hearing:
    """A crew that only listens."""

    async def drain(self, name: str, tell: Callable[[str], None]) -> None:
        tell(f"heard of {name}")


async def test_the_second_says_what_it_joins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = Deployment("shop", tmp_path / "dynamo" / "shop")
    deployment.create_folder()
    first, second = ControlServer(ANY, deployment.folder), ControlServer(ANY, deployment.folder)
    await first.start()
    assert not caplog.records
    other = await asyncio.create_subprocess_exec("sleep", "60")
    deployment.write_record(
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


async def test_orders_are_taken_again_where_somebody_took_the_socket_away(tmp_path: Path) -> None:
    deployment = Deployment("shop", tmp_path / "dynamo" / "shop")
    deployment.create_folder()
    control = ControlServer(cast("ProcessGroup", Hearing()), deployment.folder)
    await control.start()
    shutil.rmtree(deployment.folder.parent)
    deployment.create_folder()

    await control.refresh_socket()
    said = send_control_request(ControlRequest("drain", "worker-1"), deployment.folder, 5)
    assert await asyncio.to_thread(list, said) == ["heard of worker-1"]
    await control.stop()
