"""LoRA adapters that come by the model store."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.support.fake_hub import running_hub
from tests.unit.model_store.conftest import OpenStore

from dynamo.core.errors import InvalidRequest
from dynamo.inference.engines.lora_adapters import FolderAdapters
from dynamo.services.model_store.preparation import fetch_adapter

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w" * 1000}


async def test_workers_fetch_an_adapter_by_its_name_on_the_hub(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub({"org/sql": FILES}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        first = FolderAdapters()
        first.fetch = partial(fetch_adapter, await open_store("first"))
        await first.load("sql", "org/sql")
        with pytest.raises(InvalidRequest, match="no file, folder or hub model") as caught:
            await first.load("other", "org/other")
        assert caught.value.param == "lora_path"
    second = FolderAdapters()
    second.fetch = partial(fetch_adapter, await open_store("second", offline=True))
    await second.load("sql", "org/sql")
    assert second.paths == first.paths
    assert list(first.paths.values()) == ["org/sql"]


async def test_a_folder_is_used_in_its_place(open_store: OpenStore, tmp_path: Path) -> None:
    store = await open_store("process")
    assert await fetch_adapter(store, str(tmp_path)) == str(tmp_path)
    assert await fetch_adapter(store, "/no/such/folder") == "/no/such/folder"
    assert await fetch_adapter(store, "name") == "name"
