"""The LoRA adapters of one vLLM engine."""

from __future__ import annotations

import hashlib
import json
from asyncio import Lock, to_thread
from collections.abc import Collection, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from dynamo.core.adapters import adapter_id, adapter_name
from dynamo.core.errors import ConfigError, InvalidRequest, ModelNotFound, NotFound
from dynamo.core.reply import LoraAdapters

CONFIG_FILE: Final = "adapter_config.json"
WEIGHT_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
DIGEST_CHARS: Final = 16
MODULES_KEY: Final = "engine.lora_modules"


def parse_lora_modules(modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and path of each `NAME=PATH` or vLLM's `{"name": NAME, "path": PATH}`. Raises
    `ConfigError`."""
    for module in modules:
        name, _, path = module.partition("=")
        if module.startswith("{"):
            try:
                content = json.loads(module)
                name, path = content["name"], content["path"]
            except (KeyError, TypeError, ValueError):
                name = ""
        if not (name and path and isinstance(name, str) and isinstance(path, str)):
            raise ConfigError(
                f"{module!r} names no LoRA adapter (--lora-modules)",
                hint="write NAME=FOLDER",
                param=MODULES_KEY,
            )
        yield name, path


def check_lora_modules(modules: Sequence[str]) -> None:
    """Raise `ConfigError` for a module that is no adapter: vLLM needs a minute to find out."""
    for name, path in parse_lora_modules(modules):
        try:
            digest_adapter(Path(path))
        except InvalidRequest as error:
            raise ConfigError(f"{name}: {error.message}", param=MODULES_KEY) from error


class VllmAdapters(LoraAdapters):
    """The adapters that requests may name. vLLM loads one again when it needs it and has had to
    make room for others."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}
        self._replaced: dict[str, str] = {}  # the last one of each name
        self._llm: Any = None
        self._requests: dict[str, Any] = {}
        self._numbers = count(1)
        self._lock = Lock()

    @property
    def replaced(self) -> Collection[str]:
        return self._replaced.values()

    async def start(self, llm: Any, modules: Sequence[str]) -> None:
        """Load adapters into the started AsyncLLM. Raises `ConfigError`."""
        self._llm = llm
        for name, path in parse_lora_modules(modules):
            try:
                await self.load(name, path)
            except InvalidRequest as error:
                raise ConfigError(error.message, hint=error.hint, param=MODULES_KEY) from error

    def find(self, adapter: str) -> Any:
        """Return vLLM's LoRARequest for an adapter's id. Raises `ModelNotFound`."""
        request = self._requests.get(adapter)
        if request is None:
            raise ModelNotFound(
                f"LoRA adapter {adapter_name(adapter)!r} is not loaded", param="model"
            )
        return request

    async def load(self, name: str, path: str, *, replace: bool = False) -> None:
        async with self._lock:
            adapter = adapter_id(name, await to_thread(digest_adapter, Path(path)))
            others = [loaded for loaded in self.paths if adapter_name(loaded) == name]
            if others == [adapter]:
                return
            if others and not replace:
                raise InvalidRequest(
                    f"another LoRA adapter {name!r} is loaded from {self.paths[others[0]]}",
                    hint="unload it first, or set load_inplace",
                    param="lora_name",
                )
            earlier = self._replaced.pop(name, None)
            if earlier is not None:
                await self._unload(earlier)
            await self._load(adapter, name, path)
            for other in others:
                self._replaced[name] = other
                self._withdraw(other)

    async def unload(self, name: str) -> None:
        async with self._lock:
            adapters = [loaded for loaded in self.paths if adapter_name(loaded) == name]
            if not adapters:
                raise NotFound(f"there is no LoRA adapter {name!r}")
            earlier = self._replaced.pop(name, None)
            for adapter in adapters if earlier is None else [*adapters, earlier]:
                await self._unload(adapter)

    async def _load(self, adapter: str, name: str, path: str) -> None:
        from vllm.lora.request import LoRARequest

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
        self.paths = {**self.paths, adapter: path}

    async def _unload(self, adapter: str) -> None:
        self._withdraw(adapter)
        await self._llm.remove_lora(self._requests.pop(adapter).lora_int_id)

    def _withdraw(self, adapter: str) -> None:
        self.paths = {other: path for other, path in self.paths.items() if other != adapter}


def digest_adapter(folder: Path) -> str:
    """Return a digest of an adapter's files. Raises `InvalidRequest` if there are none, or they
    cannot be read."""
    try:
        return _digest(folder)
    except OSError as error:
        raise InvalidRequest(
            f"{folder} cannot be read: {error.strerror}", param="lora_path"
        ) from error


def _digest(folder: Path) -> str:
    config = folder / CONFIG_FILE
    weights = next((path for name in WEIGHT_FILES if (path := folder / name).is_file()), None)
    if not config.is_file() or weights is None:
        raise InvalidRequest(
            f"{folder} is no LoRA adapter: it has no {CONFIG_FILE} with {WEIGHT_FILES[0]}",
            hint="give the folder of an adapter on the worker's host",
            param="lora_path",
        )
    digest = hashlib.sha256()
    for path in (config, weights):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:DIGEST_CHARS]
