"""LoRA adapters in folders: their names, ids and files, and those that an engine has loaded."""

from __future__ import annotations

import hashlib
from asyncio import Lock, to_thread
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from dynamo.core.adapters import MODULES_KEY, adapter_id, adapter_name, parse_lora_modules
from dynamo.core.errors import ConfigError, InvalidRequest, NotFound
from dynamo.core.reply import LoraAdapters

CONFIG_FILE: Final = "adapter_config.json"
WEIGHT_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
DIGEST_CHARS: Final = 16


def check_lora_modules(modules: Sequence[str]) -> None:
    """Raise `ConfigError` for a module that is no adapter: an engine needs a minute to find out."""
    for name, path in parse_lora_modules(modules):
        try:
            digest_adapter(Path(path))
        except InvalidRequest as error:
            raise ConfigError(f"{name}: {error.message}", param=MODULES_KEY) from error


class FolderAdapters(LoraAdapters):
    """The adapters that requests may name. `start` loads `modules`, as `engine.lora_modules` has
    them. An engine that loads weights overrides `load_weights` and `unload_weights`."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = modules
        self.paths: dict[str, str] = {}
        self._replaced: dict[str, str] = {}  # the last one of each name
        self._lock = Lock()

    @property
    def replaced(self) -> Collection[str]:
        return self._replaced.values()

    async def start(self) -> None:
        for name, path in parse_lora_modules(self._modules):
            try:
                await self.load(name, path)
            except InvalidRequest as error:
                raise ConfigError(error.message, hint=error.hint, param=MODULES_KEY) from error

    async def load(self, name: str, path: str, *, replace: bool = False) -> None:
        async with self._lock:
            folder = path if self.fetch is None else await self.fetch(path)
            adapter = adapter_id(name, await to_thread(digest_adapter, Path(folder)))
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
            await self.load_weights(adapter, folder)
            self.paths = {**self.paths, adapter: path}
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

    async def load_weights(self, adapter: str, path: str) -> None:
        """Load the weights in a folder, which requests name by the id `adapter`. Raises
        `InvalidRequest`."""

    async def unload_weights(self, adapter: str) -> None:
        """Unload the weights of an adapter. Requests in flight continue."""

    async def _unload(self, adapter: str) -> None:
        self._withdraw(adapter)
        await self.unload_weights(adapter)

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
