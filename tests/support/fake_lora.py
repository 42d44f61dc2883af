"""LoRA adapters without vLLM: folders of adapters, and an AsyncLLM that only knows adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.external_inputs import install_module


class FakeLoraRequest(NamedTuple):
    """vLLM's LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class FakeLoraLlm:
    """Loads what has no `broken` in its path. `loaded` has the requests by their number."""

    def __init__(self) -> None:
        self.loaded: dict[int, FakeLoraRequest] = {}

    async def add_lora(self, request: FakeLoraRequest) -> bool:
        if "broken" in request.lora_path:
            raise RuntimeError("LoRA rank 64 is greater\nthan max_lora_rank 16")
        self.loaded[request.lora_int_id] = request
        return True

    async def remove_lora(self, number: int) -> bool:
        return self.loaded.pop(number, None) is not None


def install_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let imports find vLLM's LoRARequest."""
    install_module(monkeypatch, "vllm.lora.request", LoRARequest=FakeLoraRequest)


def write_adapter(folder: Path, weights: bytes = b"weights", config: Mapping[str, Any] = {}) -> str:
    """Write the files of an adapter and return the folder's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)
