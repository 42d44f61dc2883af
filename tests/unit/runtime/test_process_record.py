"""Tests of ProcessRecordWriter."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dynamo.core.clock import SystemClock
from dynamo.core.host.pids import start_ticks
from dynamo.runtime.deployment import Deployment, ProcessRecord, new_instance_id
from dynamo.runtime.processes.process_record import ProcessRecordWriter


async def test_a_late_write_does_not_bring_a_removed_record_back(tmp_path: Path) -> None:
    deployment = Deployment("d", tmp_path / "dynamo" / "d")
    record = ProcessRecord(
        deployment="d",
        role="worker",
        name="w",
        pid=os.getpid(),
        instance="i",
        start_ticks=start_ticks(os.getpid()),
    )
    writer = ProcessRecordWriter(deployment, record, SystemClock())
    await writer.create(state="ready")
    assert deployment.live_processes() == [writer.record]
    await writer.remove()
    await writer.update(children={})
    assert not deployment.live_processes()


def test_instance_ids_begin_with_the_name_and_fit_into_keys_and_headers() -> None:
    first, second = new_instance_id("worker-2"), new_instance_id("worker-2")
    assert re.fullmatch(r"worker-2-[0-9a-f]{10}", first)
    assert first != second
    assert re.fullmatch(r"my-app-1-[0-9a-f]{10}", new_instance_id("my app/1"))
