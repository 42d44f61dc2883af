"""The GPUs of this host as NVML tells them, where `nvidia-ml-py` and a driver are installed."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from threading import Thread
from typing import Any, NamedTuple

from dynamo.telemetry.metrics import Registry

log = logging.getLogger(__name__)
MAX_AGE_S = 1.0
WAIT_S = 0.1
HANG_S = 10.0


class GpuState(NamedTuple):
    """The state of one GPU."""

    utilization_ratio: float
    memory_used_bytes: float
    memory_total_bytes: float
    power_watts: float
    temperature_celsius: float


class Gpus:
    """Reads all GPUs in a thread, at most once a second: a driver that hangs holds no event loop.
    NVML is loaded by the first read."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._missing = find_spec("pynvml") is None
        self._states: Sequence[GpuState] = ()
        self._read_at = -MAX_AGE_S
        self._reads = False

    def read(self) -> Sequence[GpuState]:
        """Return the state of each GPU, as it was before if NVML takes longer than `WAIT_S`; ()
        where there are none, or NVML does not answer."""
        age_s = time.monotonic() - self._read_at
        if self._reads and age_s > HANG_S:
            self._states = ()
        elif not (self._missing or self._reads or age_s < MAX_AGE_S):
            self._read_at, self._reads = time.monotonic(), True
            thread = Thread(target=self._read_all, name="gpus", daemon=True)
            thread.start()
            thread.join(WAIT_S)
        return self._states

    def _read_all(self) -> None:
        try:
            if self._nvml is None:
                nvml = import_module("pynvml")
                nvml.nvmlInit()
                self._nvml = nvml
            self._states = [self._read_one(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        except Exception as error:  # noqa: BLE001 - every error of NVML and of its driver
            log.info("GPUs cannot be read", extra={"fields": {"error": str(error)}})
            self._missing, self._states = self._nvml is None, ()
        finally:
            self._reads = False

    def _read_one(self, index: int) -> GpuState:
        nvml = self._nvml
        card = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(card)
        return GpuState(
            nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100,
            memory.used,
            memory.total,
            nvml.nvmlDeviceGetPowerUsage(card) / 1000,
            nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
        )

    def memory_usage(self) -> str | None:
        """Return the used share of all GPUs' memory, as "45%"; None without GPUs."""
        states = self.read()
        total = sum(state.memory_total_bytes for state in states)
        return f"{sum(s.memory_used_bytes for s in states) / total:.0%}" if total else None

    def declare_metrics(self, registry: Registry, custom: Sequence[str] = ()) -> None:
        """Declare the metrics of each GPU, by its number. `custom`: other names of its use."""

        def gauge(name: str, text: str, labels: tuple[str], *, of: str) -> None:
            def values() -> Mapping[tuple[str, ...], float]:
                states = enumerate(self.read())
                return {(str(gpu),): float(getattr(state, of)) for gpu, state in states}

            registry.gauge(name, text, labels, callback=values)

        gauge(
            "dynamo_gpu_utilization_ratio", "Share of time in use", ("gpu",), of="utilization_ratio"
        )
        for name in custom:
            gauge(name, "Share of time in use", ("gpu",), of="utilization_ratio")
        gauge("dynamo_gpu_memory_used_bytes", "Memory in use", ("gpu",), of="memory_used_bytes")
        gauge("dynamo_gpu_memory_total_bytes", "Memory", ("gpu",), of="memory_total_bytes")
        gauge("dynamo_gpu_power_watts", "Power", ("gpu",), of="power_watts")
        gauge("dynamo_gpu_temperature_celsius", "Temperature", ("gpu",), of="temperature_celsius")
