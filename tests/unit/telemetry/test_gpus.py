"""GPUs are read by NVML, and left out where it is not installed or fails."""

from __future__ import annotations

import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.conftest import until

from dynamo.telemetry import Registry, gpus
from dynamo.telemetry.gpus import Gpus


class FakeNvml(ModuleType):
    """NVML with two cards."""

    NVML_TEMPERATURE_GPU = 0
    failure = ""
    used = (30 << 30, 60 << 30)

    def nvmlInit(self) -> None:
        if self.failure == "init":
            raise RuntimeError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        if self.failure:
            raise RuntimeError("GPU is lost")
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, card: int) -> Any:
        return SimpleNamespace(used=self.used[card], total=100 << 30)

    def nvmlDeviceGetUtilizationRates(self, card: int) -> Any:
        return SimpleNamespace(gpu=50 + card)

    def nvmlDeviceGetPowerUsage(self, card: int) -> int:
        return 350_500 + card

    def nvmlDeviceGetTemperature(self, card: int, sensor: int) -> int:
        return 61 + card + sensor


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml("pynvml")
    fake.__spec__ = ModuleSpec("pynvml", None)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpus, "MAX_AGE_S", 0.0)
    monkeypatch.setattr(gpus, "WAIT_S", 30.0)
    return fake


def test_each_gpu_has_metrics(nvml: FakeNvml) -> None:
    registry, cards = Registry(), Gpus()
    cards.declare_metrics(registry, ["gpu_utilization"])
    lines = registry.render().splitlines()
    assert 'dynamo_gpu_utilization_ratio{gpu="1"} 0.51' in lines
    assert 'gpu_utilization{gpu="1"} 0.51' in lines
    assert f'dynamo_gpu_memory_used_bytes{{gpu="0"}} {30 << 30}' in lines
    assert 'dynamo_gpu_power_watts{gpu="0"} 350.5' in lines
    assert 'dynamo_gpu_temperature_celsius{gpu="1"} 62' in lines
    assert cards.memory_usage() == "45%"

    nvml.failure = "lost"
    assert cards.memory_usage() is None
    nvml.failure = ""
    assert cards.memory_usage() == "45%"


def test_a_driver_that_hangs_holds_no_caller(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards, answers = Gpus(), threading.Event()
    assert cards.memory_usage() == "45%"
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", lambda index: answers.wait() and index)
    monkeypatch.setattr(gpus, "WAIT_S", 0.0)
    assert {cards.memory_usage() for _ in range(9)} == {"45%"}
    assert [thread.name for thread in threading.enumerate()].count("gpus") == 1
    monkeypatch.setattr(gpus, "HANG_S", 0.0)
    assert cards.memory_usage() is None
    answers.set()
    until(lambda: cards.memory_usage() == "45%")


def test_a_driver_that_is_not_loaded_is_asked_once(nvml: FakeNvml) -> None:
    nvml.failure = "init"
    cards = Gpus()
    assert cards.read() == ()
    nvml.failure = ""
    assert cards.read() == ()


def test_without_nvml_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_spec", lambda _: None)
    registry, cards = Registry(), Gpus()
    cards.declare_metrics(registry)
    assert cards.memory_usage() is None
    assert "dynamo_gpu_power_watts{" not in registry.render()
