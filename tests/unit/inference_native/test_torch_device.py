"""The device of the native engine, and what is refused before anything is loaded."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema import EngineSettings
from dynamo.inference.torch import device
from dynamo.inference.torch.device import TorchDevice, choose_device

TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"


class FakeCards:
    """Stands in for `torch.cuda`."""

    def __init__(self, cards: int = 1, failure: str = "", has_bfloat16: bool = True) -> None:
        self._cards, self._failure, self._has_bfloat16 = cards, failure, has_bfloat16

    def init(self) -> None:
        if self._failure:
            raise RuntimeError(self._failure)

    def device_count(self) -> int:
        return self._cards

    def is_bf16_supported(self, including_emulation: bool) -> bool:
        assert not including_emulation
        return self._has_bfloat16

    def get_device_name(self) -> str:
        return "Tesla V100"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `machine(**fields of FakeCards)`, which installs such a PyTorch; `installed=False`:
    there is none, `build=None`: one for CPUs."""

    def make(
        *, installed: bool = True, driver: bool = True, build: Any = "13.0", **cards: Any
    ) -> None:
        module = SimpleNamespace(
            __version__="2.13.0", version=SimpleNamespace(cuda=build), cuda=FakeCards(**cards)
        )
        monkeypatch.setitem(sys.modules, "torch", module)
        monkeypatch.setattr(device, "find_spec", lambda name: name if installed else None)
        monkeypatch.setattr(device, "has_nvidia_driver", lambda: driver)

    return make


def test_auto_is_numpy_without_a_card_that_torch_can_use(machine: Any) -> None:
    for fields in (
        {"installed": False}, {"driver": False}, {"build": None}, {"cards": 0}, {"failure": "x"},
    ):  # fmt: skip
        machine(**fields)
        assert choose_device(EngineSettings()) is None
        assert choose_device(EngineSettings(dtype="float32")) is None
    machine()
    assert choose_device(EngineSettings()) == TorchDevice("cuda", "bfloat16")


def test_the_default_format_suits_the_device(machine: Any) -> None:
    machine(has_bfloat16=False)
    assert choose_device(EngineSettings(device="cuda")) == TorchDevice("cuda", "float16")
    assert choose_device(EngineSettings(device="cpu")) == TorchDevice("cpu", "float32")
    settings = EngineSettings(device="cpu", dtype="bfloat16")
    assert choose_device(settings) == TorchDevice("cpu", "bfloat16")


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"installed": False}, {"device": "cuda"}, "PyTorch is not installed"),
        ({"installed": False}, {"device": "cpu"}, "PyTorch is not installed"),
        ({"build": None}, {"device": "cuda"}, "this build has no CUDA"),
        ({"cards": 0}, {"device": "cuda"}, "no card is visible"),
        ({"failure": TOO_OLD}, {"device": "cuda"}, "driver on your system is too old"),
        ({"has_bfloat16": False}, {"dtype": "bfloat16"}, "Tesla V100 lacks"),
        ({"driver": False}, {"dtype": "float16"}, "NumPy computes in float32"),
        ({"cards": 0}, {"dtype": "bfloat16"}, "no card is visible"),
    ],
    ids=str,
)
def test_what_a_machine_lacks_is_one_line(
    machine: Any, fields: Any, settings: Any, message: str
) -> None:
    machine(**fields)
    with pytest.raises(ConfigError, match=message) as caught:
        choose_device(EngineSettings(**settings))
    assert "\n" not in caught.value.message
    assert caught.value.hint
