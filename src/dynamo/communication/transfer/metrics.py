"""Metrics of the transfer plane."""

from __future__ import annotations

from typing import Final

from dynamo.telemetry import Registry

_SECONDS_BOUNDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class TransferMetrics:
    """Counts bytes, seconds and failures of the pulls of a process."""

    def __init__(self, registry: Registry | None = None) -> None:
        registry = registry or Registry()
        self.bytes = registry.counter(
            "dynamo_transfer_bytes_total", "Bytes of KV blocks pulled from peers", ("backend",)
        )
        self.seconds = registry.histogram(
            "dynamo_transfer_seconds",
            "Time of a pull from a peer, without failed ones",
            _SECONDS_BOUNDS,
            ("backend",),
        )
        self.failures = registry.counter(
            "dynamo_transfer_failures_total",
            "Failed pulls and connections: stale, checksum, gone, timeout, refused",
            ("backend", "reason"),
        )
