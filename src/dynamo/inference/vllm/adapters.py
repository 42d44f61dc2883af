"""The LoRA adapters of one vLLM engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from dynamo.core.adapters import adapter_name
from dynamo.core.errors import InvalidRequest, ModelNotFound
from dynamo.inference.engines.lora_adapters import FolderAdapters


class VllmAdapters(FolderAdapters):
    """The adapters that a started AsyncLLM has loaded. vLLM loads one again when it needs it and
    has had to make room for others."""

    def __init__(self, llm: Any, modules: Sequence[str] = ()) -> None:
        super().__init__(modules)
        self._llm = llm
        self._requests: dict[str, Any] = {}
        self._numbers = count(1)

    def find(self, adapter: str) -> Any:
        """Return vLLM's LoRARequest for an adapter's id. Raises `ModelNotFound`."""
        request = self._requests.get(adapter)
        if request is None:
            raise ModelNotFound(
                f"LoRA adapter {adapter_name(adapter)!r} is not loaded", param="model"
            )
        return request

    async def load_weights(self, adapter: str, path: str) -> None:
        from vllm.lora.request import LoRARequest

        name = adapter_name(adapter)
        request = LoRARequest(adapter, next(self._numbers), path)  # equal names are one in a batch
        try:
            loaded = await self._llm.add_lora(request)
        except Exception as error:
            reason = " ".join(str(error).split())[:500]
            raise InvalidRequest(
                f"vLLM cannot load LoRA adapter {name!r} from {path}: {reason}", param="lora_path"
            ) from error
        if not loaded:
            raise InvalidRequest(f"vLLM did not load LoRA adapter {name!r} from {path}")
        self._requests[adapter] = request

    async def unload_weights(self, adapter: str) -> None:
        await self._llm.remove_lora(self._requests.pop(adapter).lora_int_id)
