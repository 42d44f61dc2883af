"""A round of tuning: one process of a deployment has other settings until there is a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.operations.bench.traces import RECORD_FILES
from dynamo.operations.tuner.verdict import LiveRequest, TrialRules, TrialVerdict, judge
from dynamo.runtime.processes.control import trying
from dynamo.scheduling.request_record import RequestRecord

POLLS = 60
"""Looks at the record in a period."""
SPARE_S = 60
CANCELLED = "cancelled"
_decode = msgspec.json.Decoder(RequestRecord).decode


class RecordTail:
    """The rows of the record of a deployment from a time on. Methods block."""

    def __init__(self, folder: Path, from_s: float) -> None:
        self._folder, self._from_s = folder, from_s
        self._sizes: dict[Path, int] = {}
        for path in folder.glob(RECORD_FILES):
            status = path.stat()
            if status.st_mtime < from_s:
                self._sizes[path] = status.st_size

    def read(self) -> list[tuple[str, RequestRecord]]:
        """Return the new rows, with the name of the process that served the client."""
        rows = []
        for path in self._folder.glob(RECORD_FILES):
            with suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(self._sizes.get(path, 0))
                lines = file.read()
                complete = lines[: lines.rfind(b"\n") + 1]
                self._sizes[path] = self._sizes.get(path, 0) + len(complete)
                name = path.stem.rpartition("-")[0]
                for line in complete.splitlines():
                    with suppress(msgspec.DecodeError, UnicodeDecodeError):
                        rows.append((name, _decode(line)))
        return [(name, row) for name, row in rows if row.timestamp >= self._from_s * 1e3]


async def run_round(
    folder: Path,
    record: Path,
    kind: str,
    values: Mapping[str, Any],
    trial: TrialRules,
    clock: Clock,
) -> TrialVerdict:
    """Try settings on a process of a kind, and let all of the kind have them, or none. Raises as
    `SettingTrial.run`."""
    tail = RecordTail(record, clock.wall() - trial.period_s)
    limit_s = math.ceil(2 * trial.period_s) + SPARE_S
    async with trying(folder, kind, values, limit_s) as running:
        trial = replace(trial, begin_s=clock.wall())
        requests: list[LiveRequest] = []
        verdict: TrialVerdict | None = None
        while verdict is None:
            await running.wait(trial.period_s / POLLS)
            rows = await clock.offload(tail.read)
            requests += live_requests(rows, running.instance)
            verdict = await clock.offload(partial(judge, trial, requests, clock.wall()))
        await (running.keep() if verdict.keep else running.take_back())
    return verdict


def live_requests(rows: Sequence[tuple[str, RequestRecord]], instance: str) -> list[LiveRequest]:
    """Return the requests that a worker has got. `instance` is a worker or a frontend."""
    frontends = {name for name, _ in rows}
    return [
        LiveRequest(
            row.timestamp / 1e3,
            row.input_length,
            row.output_length,
            None if row.end or row.ttft_ms is None else row.ttft_ms / 1e3,
            None if row.end else row.e2e_ms / 1e3,
            "" if instance in frontends else row.worker,
            instance in {name, row.worker},
            0.0 if instance in frontends else (row.queue_ms or 0.0) / 1e3,
        )
        for name, row in rows
        if row.end != CANCELLED and row.worker
    ]
