"""The control socket: two supervisors of the same deployment, a deleted socket file."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo.core.host.pids import start_ticks
from dynamo.runtime.deployment import Deployment, ProcessRecord
from dynamo.runtime.processes.control import ControlRequest, ControlServer, send_control_request
from dynamo.runtime.processes.process_group import ProcessGroup
from dynamo.runtime.processes.served_models import ServedModels

UNUSED = cast("ProcessGroup", None)
UNUSED_MODELS = cast("ServedModels", None)


class FakeProcessGroup:
    """Accepts `drain` requests and only reports progress."""

    async def drain(self, name: str, progress: Callable[[str], None]) -> None:
        progress(f"draining {name}")


async def no_report() -> str:
    return ""


async def test_the_second_supervisor_logs_what_it_joins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = Deployment("shop", tmp_path / "dynamo" / "shop")
    deployment.create_folder()
    first, second = (
        ControlServer(UNUSED, UNUSED_MODELS, deployment.folder, no_report),
        ControlServer(UNUSED, UNUSED_MODELS, deployment.folder, no_report),
    )
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
    (record,) = cast("list[Any]", caplog.records)
    assert "joined" in record.message
    url = "http://127.0.0.1:8000"
    assert record.fields == {"deployment": "shop", "pid": other.pid, "url": url}
    other.kill()
    await other.wait()
    await second.stop()
    await first.stop()


async def test_a_deleted_control_socket_is_created_again(tmp_path: Path) -> None:
    deployment = Deployment("shop", tmp_path / "dynamo" / "shop")
    deployment.create_folder()
    control = ControlServer(
        cast("ProcessGroup", FakeProcessGroup()), UNUSED_MODELS, deployment.folder, no_report
    )
    await control.start()
    shutil.rmtree(deployment.folder.parent)
    deployment.create_folder()

    await control.refresh_socket()
    progress = send_control_request(ControlRequest("drain", "worker-1"), deployment.folder, 5)
    assert await asyncio.to_thread(list, progress) == ["draining worker-1"]
    await control.stop()
