"""Models that come from peers, piece by piece."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.unit.model_store.conftest import OpenStore

from dynamo.models.downloads.sources import parse_spec
from dynamo.services.model_store.download import fetch_model


async def test_a_process_with_an_empty_shelf_gets_all_from_its_peer(
    open_store: OpenStore, source_folder: Path, weights: bytes
) -> None:
    spec = parse_spec(f"file://{source_folder}")
    assert spec is not None
    first, second = await open_store("first"), await open_store("second", offline=True)
    model = await fetch_model(first, spec)
    shutil.rmtree(source_folder)
    copy = await fetch_model(second, spec)
    assert copy.folder != model.folder
    assert (copy.folder / "model.safetensors").read_bytes() == weights
    assert first.server.sent_bytes == model.manifest.size_bytes
    assert copy.manifest == model.manifest
