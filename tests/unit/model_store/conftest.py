"""Processes with shelves of their own, which share one discovery folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from dynamo.core.settings import Settings
from dynamo.models.shelf.manifest import PIECE_BYTES
from dynamo.models.shelf.shelf import Shelf
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.model_store.store import ModelStore

OpenStore = Callable[..., Awaitable[ModelStore]]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture(scope="session")
def weights() -> bytes:
    """The content of a file of four pieces, the last of which is short."""
    return Random(0).randbytes(3 * PIECE_BYTES + 12345)


@pytest.fixture
def source_folder(tmp_path: Path, weights: bytes) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_bytes(b'{"model_type": "x"}')
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
async def open_store(tmp_path: Path) -> AsyncIterator[OpenStore]:
    """`open_store(name, offline=False)` opens the store of a process with the shelf `name`."""
    runtimes: list[DistributedRuntime] = []

    async def open_one(
        name: str, *, offline: bool = False, budget: int = 0, is_store: bool = False
    ) -> ModelStore:
        settings = Settings()
        settings = replace(
            settings,
            runtime=replace(settings.runtime, discovery=f"file:{tmp_path / 'discovery'}"),
            store=replace(settings.store, offline=offline),
        )
        runtime = await DistributedRuntime.create(settings, role="worker", name=name)
        runtimes.append(runtime)
        root = tmp_path / "shelves" / name
        root.mkdir(parents=True, exist_ok=True)
        store = ModelStore(runtime, Shelf(root, budget), is_store=is_store)
        await store.start()
        return store

    yield open_one
    for runtime in runtimes:
        await runtime.shutdown(0)
