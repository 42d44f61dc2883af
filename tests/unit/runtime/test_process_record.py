"""Tests of ProcessRecordWriter."""

from __future__ import annotations

import os
from pathlib import Path

from dynamo.core.clock import SystemClock
from dynamo.runtime.deployment import Deployment, ProcessRecord
from dynamo.runtime.pids import start_ticks
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
