"""A running deployment as its status ports tell it, also while some processes hang."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dynamo.runtime.deployment import ProcessRecord

STATUS_TIMEOUT_S = 2.0
MAX_THREADS = 256
LOAD_METRICS = (
    ("dynamo_worker_running_requests", "dynamo_worker_waiting_requests"),
    ("dynamo_frontend_inflight_requests", "dynamo_frontend_queued_requests"),
)
_VALUE = re.compile(r"^(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)


class ProcessReading(msgspec.Struct, frozen=True):
    """The answers of a process's status port. `error` says why it did not answer."""

    record: ProcessRecord
    health: Mapping[str, Any] = {}
    metrics: str = ""
    error: str = ""

    @property
    def load(self) -> tuple[int, int] | None:
        """The requests that the process computes or answers, and those that wait there."""
        values = sum_samples(self.metrics)
        for running, waiting in LOAD_METRICS:
            if running in values:
                return int(values[running]), int(values.get(waiting, 0))
        return None


def sum_samples(metrics: str) -> Mapping[str, float]:
    """Return the sum of each metric over its labels, of a text in Prometheus' format."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, value in _VALUE.findall(metrics):
        sums[name] += float(value)
    return sums


def read_processes(
    records: Sequence[ProcessRecord], *, health: bool = True, metrics: bool = True
) -> Sequence[ProcessReading]:
    """Return the readings of these processes, in order. Blocks for `STATUS_TIMEOUT_S` and a little
    at most for up to `MAX_THREADS` processes."""

    def read(record: ProcessRecord) -> ProcessReading:
        if not record.status_url or not record.pid:
            return ProcessReading(record, error=f"it is {record.state} and has no status port")
        try:
            body = fetch(record.status_url, "/health") if health else b"{}"
            text = fetch(record.status_url, "/metrics") if metrics else b""
            facts = msgspec.json.decode(body, type=dict[str, Any])
        except (OSError, HTTPException, msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = str(error) or type(error).__name__
            return ProcessReading(record, error=f"{record.status_url} does not answer: {reason}")
        return ProcessReading(record, facts, text.decode(errors="replace"))

    if not records:
        return ()
    with ThreadPoolExecutor(min(MAX_THREADS, len(records))) as threads:
        return list(threads.map(read, records))


def read_alerts(records: Sequence[ProcessRecord]) -> Sequence[Mapping[str, Any]]:
    """Return the active alerts, which a deployment's supervisor tells. Blocks."""
    for record in records:
        if record.role == "supervisor" and record.status_url:
            with suppress(OSError, HTTPException, msgspec.DecodeError):
                body = msgspec.json.decode(fetch(record.status_url, "/health"))
                alerts: Sequence[Mapping[str, Any]] = body.get("alerts", ())
                return alerts
    return ()


def fetch(url: str, path: str) -> bytes:
    """Return the body at a path of a status port, of any status. Raises `OSError` and
    `HTTPException`."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=STATUS_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()
