"""Models that come from peers and, by one of all, from the hub."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.fake_hub import FakeHub, running_hub
from tests.unit.model_store.conftest import OpenStore

from dynamo.communication.requests import ResponseWriter
from dynamo.core.errors import ModelUnavailable, NotFound
from dynamo.core.tasks import run_all
from dynamo.models.downloads import fetching as fetching_module
from dynamo.models.downloads.sources import ModelSpec, parse_spec
from dynamo.models.file_cache import FileRef, file_ref
from dynamo.models.shelf.manifest import PIECE_BYTES
from dynamo.services.model_store import store as store_module
from dynamo.services.model_store.component import ModelKeeper
from dynamo.services.model_store.download import fetch_from_peers, fetch_model
from dynamo.services.model_store.files import FileQuery
from dynamo.services.model_store.store import ModelStore, ensure_file

MODEL = ModelSpec("org/model")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, weights: bytes) -> Iterator[FakeHub]:
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": weights}
    with running_hub({MODEL.name: files}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def folder_spec(folder: Path) -> ModelSpec:
    spec = parse_spec(f"file://{folder}")
    assert spec is not None
    return spec


async def test_a_process_with_an_empty_shelf_gets_all_from_its_peer(
    open_store: OpenStore, source_folder: Path, weights: bytes
) -> None:
    spec = folder_spec(source_folder)
    first, second = await open_store("first"), await open_store("second", offline=True)
    model = await fetch_model(first, spec)
    shutil.rmtree(source_folder)
    copy = await fetch_model(second, spec)
    assert copy.folder != model.folder
    assert (copy.folder / "model.safetensors").read_bytes() == weights
    assert first.server.sent_bytes == model.manifest.size_bytes
    assert copy.manifest == model.manifest


async def test_one_of_eight_asks_the_hub(
    open_store: OpenStore, hub: FakeHub, weights: bytes
) -> None:
    stores = [await open_store(f"process-{number}") for number in range(8)]
    steps: list[str] = []
    models = await run_all(
        *(fetch_model(store, MODEL, lambda step, *_: steps.append(step)) for store in stores)
    )
    for model in models:
        assert (model.folder / "model.safetensors").read_bytes() == weights
    assert len({model.folder for model in models}) == 8
    assert hub.sent_bytes <= 1.05 * models[0].manifest.size_bytes + 10_000
    assert len([path for _, path, _ in hub.requests if "/api/" in path]) == 1
    assert steps.count("fetching org/model") > 8


async def test_all_wait_for_a_busy_hub_once(open_store: OpenStore, hub: FakeHub) -> None:
    hub.busy = ["1", "1"]  # for the question of the commit, and for the first file
    stores = [await open_store(f"process-{number}") for number in range(3)]
    steps: list[str] = []
    await run_all(
        *(fetch_model(store, MODEL, lambda step, *_: steps.append(step)) for store in stores)
    )
    api = [path for _, path, _ in hub.requests if "/api/" in path]
    assert len(api) <= 3
    assert any("it is asked again in 1 s" in step for step in steps)


async def test_who_waits_gets_the_reason_of_who_asked(open_store: OpenStore, hub: FakeHub) -> None:
    hub.token, hub.gated = "secret", True
    stores = [await open_store(f"process-{number}") for number in range(4)]
    results = await asyncio.gather(
        *(fetch_model(store, MODEL) for store in stores), return_exceptions=True
    )
    assert {str(result) for result in results} == {
        "org/model is gated, or the token may not read it"
    }
    assert len(hub.requests) < 4


async def test_a_store_asks_the_source_for_others(open_store: OpenStore, hub: FakeHub) -> None:
    worker = await open_store("a-worker", offline=True)
    keeper = await open_store("z-store", is_store=True)
    ModelKeeper(keeper)
    model = await fetch_model(worker, MODEL)
    copy = keeper.shelf.find(MODEL.name, MODEL.revision)
    assert copy is not None
    assert copy.manifest == model.manifest
    assert hub.sent_bytes <= 1.05 * model.manifest.size_bytes


async def test_one_of_two_stores_asks_the_source(open_store: OpenStore, hub: FakeHub) -> None:
    workers = [await open_store(f"worker-{number}", offline=True) for number in range(3)]
    keepers = [await open_store(f"store-{number}", is_store=True) for number in range(2)]
    for keeper in keepers:
        ModelKeeper(keeper)
    models = await run_all(*(fetch_model(worker, MODEL) for worker in workers))
    async with asyncio.timeout(20):
        while not all(keeper.shelf.find(MODEL.name, MODEL.revision) for keeper in keepers):
            await asyncio.sleep(0.02)
    assert len({model.manifest for model in models}) == 1
    assert hub.sent_bytes <= 1.05 * models[0].manifest.size_bytes
    assert len([path for _, path, _ in hub.requests if "/api/" in path]) == 1


async def test_a_second_store_goes_on_when_the_first_is_gone(
    open_store: OpenStore, hub: FakeHub, weights: bytes
) -> None:
    hub.rate = 20_000_000
    worker = await open_store("worker", offline=True)
    first, second = [await open_store(name, is_store=True) for name in ("a-store", "z-store")]
    for keeper in (first, second):
        ModelKeeper(keeper)
    fetching = asyncio.ensure_future(fetch_model(worker, MODEL))
    async with asyncio.timeout(20):
        while hub.sent_bytes < len(weights) / 4:
            await asyncio.sleep(0.01)
    asking = min((first, second), key=lambda store: store.runtime.instance_id)
    await asking.runtime.shutdown(0)
    hub.rate = 0
    model = await asyncio.wait_for(fetching, 40)
    assert (model.folder / "model.safetensors").read_bytes() == weights


async def test_a_commit_that_vanishes_meanwhile_is_one_line(
    open_store: OpenStore, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fetching_module.fetch_piece

    def fetch_piece(*arguments: Any) -> int:
        hub.commit = "d" * 40
        return whole(*arguments)

    monkeypatch.setattr(fetching_module, "fetch_piece", fetch_piece)
    store = await open_store("process")
    with pytest.raises(ModelUnavailable, match="has not, or no longer") as caught:
        await fetch_model(store, MODEL)
    assert "commits/main" in caught.value.hint
    assert store.shelf.find(MODEL.name, MODEL.revision) is None
    assert not store.server.models


async def test_a_peer_whose_manifest_lies_is_left_out(
    open_store: OpenStore, source_folder: Path
) -> None:
    spec = folder_spec(source_folder)
    sound, liar = await open_store("sound"), await open_store("liar")
    model = await fetch_model(sound, spec)
    await liar.offer_model(spec, model)
    (offer,) = liar.server.models.values()
    outside = replace(model.manifest.files[0], path="../config.json")
    offer.manifest = replace(model.manifest, files=(outside, *model.manifest.files[1:]))
    readers = [await open_store(f"reader-{number}", offline=True) for number in range(3)]
    for reader in readers:
        copy = await fetch_model(reader, spec)
        assert copy.manifest == model.manifest
        assert not (copy.folder.parent / "config.json").exists()
        await reader.runtime.shutdown(0)


def damage(store: ModelStore) -> None:
    (offer,) = store.server.models.values()
    read = offer.read
    offer.read = lambda number: b"x" + read(number)[1:]


def hang(store: ModelStore) -> None:
    async def send(query: FileQuery, outgoing: ResponseWriter) -> None:
        await asyncio.sleep(100)

    store.server._send_piece = send  # type: ignore[method-assign]


def delay(store: ModelStore) -> None:
    """Let the store take 0.3 s for each piece."""
    send_at_once = store.server._send_piece

    async def send(query: FileQuery, outgoing: ResponseWriter) -> None:
        await asyncio.sleep(0.3)
        await send_at_once(query, outgoing)

    store.server._send_piece = send  # type: ignore[method-assign]


def die(store: ModelStore) -> None:
    async def send(query: FileQuery, outgoing: ResponseWriter) -> None:
        outgoing.send(b"x")
        await store.runtime.requests.close()

    store.server._send_piece = send  # type: ignore[method-assign]


async def test_each_bad_peer_is_named_and_left_out(
    open_store: OpenStore,
    source_folder: Path,
    weights: bytes,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dynamo.services.model_store.scheduler.HANG_S", 1.0)
    (source_folder / "model-2.safetensors").write_bytes(weights * 4)
    spec = folder_spec(source_folder)
    names = ("sound", "damaged", "hanging", "dying")
    peers = {name: await open_store(name) for name in names}
    model = await fetch_model(peers["sound"], spec)
    for name in names[1:]:
        await peers[name].offer_model(spec, model)
    delay(peers["sound"])  # the reader needs more than HANG_S
    damage(peers["damaged"])
    hang(peers["hanging"])
    die(peers["dying"])
    reader = await open_store("reader", offline=True)
    caplog.set_level(logging.WARNING)
    copy = await fetch_model(reader, spec)
    for path in ("model.safetensors", "model-2.safetensors"):
        assert (copy.folder / path).read_bytes() == (source_folder / path).read_bytes()
    left_out = {
        record.fields["peer"]: record.fields["reason"]  # type: ignore[attr-defined]
        for record in caplog.records
        if "left out" in record.message
    }
    ids = {peers[name].runtime.instance_id for name in names[1:]}
    assert set(left_out) == ids
    assert "is damaged" in left_out[peers["damaged"].runtime.instance_id]


async def test_readers_that_die_midway_cost_the_next_one_nothing(
    open_store: OpenStore, source_folder: Path, weights: bytes
) -> None:
    spec = folder_spec(source_folder)
    keeper = await open_store("keeper")
    await fetch_model(keeper, spec)
    for number in range(6):  # all are connected to each other in this process
        reader = await open_store(f"reader-{number}", offline=True)
        begun = asyncio.Event()
        task = asyncio.ensure_future(fetch_model(reader, spec, lambda *_, e=begun: e.set()))
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    copy = await fetch_model(await open_store("last", offline=True), spec)
    assert (copy.folder / "model.safetensors").read_bytes() == weights
    async with asyncio.timeout(10):
        while keeper.server.followers or keeper.server._uploads:
            await asyncio.sleep(0.01)


async def test_a_dead_process_s_pieces_are_not_fetched_again(
    open_store: OpenStore, hub: FakeHub, weights: bytes
) -> None:
    hub.rate = 100_000_000
    store = await open_store("process")
    half = asyncio.Event()

    def progress(step: str, done: int, total: int) -> None:
        if total and done >= total / 2:
            half.set()

    task = asyncio.ensure_future(fetch_model(store, MODEL, progress))
    await half.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    first = hub.sent_bytes
    model = await fetch_model(store, MODEL)
    assert (model.folder / "model.safetensors").read_bytes() == weights
    assert hub.sent_bytes - first <= 0.55 * len(weights) + PIECE_BYTES
    assert hub.sent_bytes <= 1.2 * len(weights)


async def test_a_served_folder_is_read_by_a_peer(
    open_store: OpenStore, source_folder: Path, weights: bytes
) -> None:
    server, reader = await open_store("server"), await open_store("reader", offline=True)
    await server.offer_folder("my-model", source_folder)
    model = await fetch_from_peers(reader, ModelSpec("my-model"))
    assert model is not None
    assert (model.folder / "model.safetensors").read_bytes() == weights
    assert await fetch_from_peers(reader, ModelSpec("other")) is None


async def test_without_peers_and_source_one_line_says_so(open_store: OpenStore) -> None:
    with pytest.raises(ModelUnavailable, match="the model store is offline"):
        await fetch_model(await open_store("alone", offline=True), MODEL)


async def test_a_file_is_served_by_hash(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(bytes(range(256)) * 4000)
    ref = file_ref(path)
    server, reader = await open_store("server"), await open_store("reader")
    server.offer_file(ref)
    stored: list[tuple[str, bytes]] = []
    monkeypatch.setattr(store_module, "find_file", lambda ref: None)

    def store_file(ref: FileRef, content: bytes) -> Any:
        stored.append((ref.name, content))

    monkeypatch.setattr(store_module, "store_file", store_file)
    assert await ensure_file(reader.runtime, ref) == ref
    assert stored == [("tokenizer.json", path.read_bytes())]
    with pytest.raises((ModelUnavailable, NotFound)):
        await ensure_file(reader.runtime, FileRef("other.json", "0" * 64, 1))
