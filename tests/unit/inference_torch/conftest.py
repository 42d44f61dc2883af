"""Engines on PyTorch, with the tiny model and the requests of the tests of the native engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.unit.inference_native.conftest import (
    make_request,
    reference_llama,
    tiny_llama,
)

from dynamo.core.clock import SystemClock
from dynamo.core.settings.schema import EngineSettings
from dynamo.core.settings.schema_cache import NO_TIERS, CacheSettings
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.tiers.opening import tier_opener
from dynamo.inference.torch.device import TorchDevice
from dynamo.models.checkpoint.weights import open_weights

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are loaded
if find_spec("torch"):
    import torch

    torch.set_num_threads(1)  # small tensors; a second thread waits longer than it computes

__all__ = ["make_request", "reference_llama", "tiny_llama"]

SHARED: dict[bytes, Any] = {}
"""Tensors that regions of this process share."""


def stand_in_region(slots: int, slot_bytes: int, host_slots: int = 0) -> Any:
    """Return a region whose slots lie in a tensor, which only the region's copies can reach."""
    return stand_in_class().over(torch.zeros(slots, slot_bytes, dtype=torch.uint8), host_slots)


def stand_in_class() -> Any:
    """Return `DeviceRegion` without CUDA IPC: processes of a test are objects of this one."""
    from dynamo.inference.torch.device_region import DeviceRegion

    class StandInRegion(DeviceRegion):
        memory_type = "DRAM"

        def share(self) -> bytes:
            key = b"%d" % id(self)
            SHARED[key] = self._blocks
            return key

        def open_shared(self, description: bytes, slots: int) -> Any:
            blocks = SHARED[description]
            assert slots == len(blocks)
            return partial(self._copy_slots, blocks)

    return StandInRegion


MakeEngine = Callable[..., BatchedEngine]


def open_engine(
    folder: Path, dtype: Any = "float32", cache: CacheSettings = NO_TIERS, **settings: Any
) -> BatchedEngine:
    """Return an engine over the weights in `folder`. `dtype` "numpy": that of NumPy, "apart": in
    float32, with its blocks apart from host memory as on a card."""
    from dynamo.inference.torch.runner import TorchRunner

    engine_settings = EngineSettings(
        **({"threads": 1, "num_blocks": 64, "block_size": 4} | settings)
    )
    if dtype == "numpy":
        runner: Any = NativeRunner(lambda: open_weights(folder), engine_settings, cache=cache)
    else:
        device = TorchDevice("cpu", "float32" if dtype == "apart" else dtype)
        runner = TorchRunner(lambda: open_weights(folder), engine_settings, device, cache=cache)
        runner._is_apart = dtype == "apart"
    return BatchedEngine(
        runner,
        prefix_caching=engine_settings.prefix_caching,
        open_tiers=tier_opener(cache, engine_settings, SystemClock()),
    )


@pytest.fixture
def make_engine(tiny_llama: Path) -> MakeEngine:
    """Return `make_engine(dtype, cache, **settings)` over the tiny Llama."""
    return lambda *args, **settings: open_engine(tiny_llama, *args, **settings)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split decoding into few parts: Triton's interpreter takes milliseconds a program."""
    from dynamo.inference.torch import kernels

    monkeypatch.setattr(kernels, "PROGRAMS", 12)
