"""Compile caches: their identities, and the way of their files through a store."""

from __future__ import annotations

import asyncio
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.conftest import until
from tests.support.external_inputs import install_module, make_inputs
from tests.support.fake_sglang import FakeSglang
from tests.support.servers import S3Process

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.inference.engines import compile_cache
from dynamo.inference.engines.compile_cache import (
    CompileCache,
    CompileIdentity,
    FolderStore,
    open_compile_cache,
    open_store,
    read_identity,
)
from dynamo.inference.sglang.engine import SglangEngine

IDENTITY = CompileIdentity(("m", "", "c0"), "vllm", {}, {}, {}, ())
COMMIT = "0123456789" * 4
CARD = "Model: \t\t NVIDIA H200\nIRQ: 1\n"


@pytest.fixture
def on_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CompileCache]:
    """`on_host(name)`: the cache of an identity on a host with a cache folder of its own."""

    def make(name: str, identity: CompileIdentity = IDENTITY, store: Any = None) -> CompileCache:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        cache = CompileCache(identity, store or FolderStore(tmp_path / "store"))
        cache.fetch()
        return cache

    return make


def compile_files(cache: CompileCache, text: str = "kernel") -> None:
    """Do what an engine does: fill the folders of the variables."""
    for variable in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"):
        path = Path(cache.environment[variable], "deep", "file.so")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def content(cache: CompileCache) -> dict[str, str]:
    files = (path for path in cache.folder.rglob("*") if path.is_file())
    return {str(path.relative_to(cache.folder)): path.read_text() for path in files}


def archives(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store").glob("*.zip"))


def test_another_host_gets_what_the_first_has_compiled(
    on_host: Callable[..., CompileCache], tmp_path: Path
) -> None:
    first = on_host("first")
    assert content(first) == {}
    compile_files(first)
    first.save()
    second = on_host("second")
    assert content(second) == content(first)
    assert content(second) == {"vllm/deep/file.so": "kernel", "triton/deep/file.so": "kernel"}
    assert all(Path(path).is_dir() for path in second.environment.values())
    other = replace(IDENTITY, flags={"dtype": "float16"})
    assert content(on_host("second", other)) == {}
    assert content(on_host("third", other)) == {}
    assert len(archives(tmp_path)) == 1


def test_only_what_is_new_is_stored(on_host: Callable[..., CompileCache], tmp_path: Path) -> None:
    stored: list[str] = []

    class CountingStore(FolderStore):
        def put(self, name: str, source: Path) -> None:
            stored.append(name)
            super().put(name, source)

    store = CountingStore(tmp_path / "store")
    first = on_host("first", store=store)
    compile_files(first)
    first.save()
    first.save()
    second = on_host("second", store=store)
    second.save()
    assert len(stored) == 1
    compile_files(second, "another kernel")
    second.save()
    assert len(stored) == 2
    assert content(on_host("third", store=store)) == content(second)
    compile_files(on_host("first", store=store), "kept")
    assert "kept" in content(on_host("first", store=store)).values(), "its folder is not replaced"


def cut(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-40])


def flip(archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as zipped:
        start = zipped.infolist()[0]
    data[start.header_offset + 30 + len(start.filename) + 2] ^= 0x55
    archive.write_bytes(data)


def of_another_identity(archive: Path) -> None:
    with zipfile.ZipFile(archive, "a") as zipped:
        zipped.comment = b"0" * 64


@pytest.mark.parametrize("damage", [cut, flip, of_another_identity])
def test_a_damaged_archive_is_not_used_and_is_replaced(
    on_host: Callable[..., CompileCache],
    tmp_path: Path,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = on_host("first")
    compile_files(first)
    first.save()
    damage(archives(tmp_path)[0])
    second = on_host("second")
    assert content(second) == {}
    assert "compile cache not fetched" in caplog.text
    compile_files(second)
    second.save()
    assert content(on_host("third")) == content(first)


def test_files_of_an_archive_stay_in_its_folder(
    on_host: Callable[..., CompileCache], tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    with zipfile.ZipFile(tmp_path / "store" / f"{IDENTITY.digest}.zip", "w") as zipped:
        zipped.writestr("../../../outside", "x")
        zipped.writestr("/absolute", "x")
        zipped.comment = IDENTITY.digest.encode()
    assert set(content(on_host("first"))) == {"outside", "absolute"}
    assert not list(tmp_path.glob("outside"))


def test_a_store_that_fails_costs_only_time(
    on_host: Callable[..., CompileCache], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "store").write_text("in the way")
    cache = on_host("first")
    compile_files(cache)
    cache.save()
    assert "compile cache not fetched" in caplog.text
    assert "compile cache not stored" in caplog.text
    assert content(cache)


def test_a_bucket_is_a_store(
    on_host: Callable[..., CompileCache], s3_server: S3Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{s3_server.bucket}/compiled")
    first = on_host("first", store=store)
    compile_files(first)
    first.save()
    assert content(on_host("second", store=store)) == content(first)


@pytest.mark.parametrize("url", ["folder", "ftp://host/folder", "s3://"])
def test_other_stores_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="store") as caught:
        open_store(url)
    assert caught.value.hint
    assert caught.value.param == "engine.compile_cache"


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, a processor and a card."""
    install_module(monkeypatch, "sglang", Engine=FakeSglang)
    folder, cards = tmp_path / COMMIT, tmp_path / "gpus" / "0"
    folder.mkdir()
    cards.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (cards / "information").write_text(CARD)
    (tmp_path / "cpuinfo").write_text("processor: 0\nflags\t: fpu avx2\n")
    monkeypatch.setattr(compile_cache, "CARDS", tmp_path / "gpus")
    monkeypatch.setattr(compile_cache, "CPUS", tmp_path / "cpuinfo")
    monkeypatch.setattr(compile_cache.metadata, "version", lambda name: f"{name} 1")
    for name in [name for name in os.environ if compile_cache.FLAG_NAMES.match(name)]:
        monkeypatch.delenv(name)
    return folder


def identity(folder: Path, name: str = "model", **engine: Any) -> CompileIdentity:
    return read_identity(Settings(engine=EngineSettings(kind="sglang", **engine)), name, folder)


def test_an_identity_has_all_that_decides_what_is_compiled(
    surroundings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = [identity(surroundings)]
    assert identity(surroundings) == identities[0]
    assert identities[0].model[:2] == ("model", COMMIT)
    assert identities[0].processors[-1] == "NVIDIA H200"
    identities.append(identity(surroundings, "another model"))
    identities.append(identity(surroundings, tensor_parallel_size=2))
    identities.append(identity(surroundings, dtype="float16"))
    identities.append(identity(surroundings, args={"enable_lora": True}))
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    identities.append(identity(surroundings))
    monkeypatch.setattr(compile_cache.metadata, "version", lambda name: f"{name} 2")
    identities.append(identity(surroundings))
    (tmp_path / "cpuinfo").write_text("flags\t: fpu avx2 avx512f\n")
    identities.append(identity(surroundings))
    (tmp_path / "gpus" / "0" / "information").write_text(CARD.replace("H200", "L4"))
    identities.append(identity(surroundings))
    (surroundings / "config.json").write_text('{"layers": 1}')
    identities.append(identity(surroundings))
    surroundings = surroundings.rename(tmp_path / COMMIT[::-1])
    identities.append(identity(surroundings))
    assert len({each.digest for each in identities}) == len(identities)


@pytest.mark.parametrize("name", ["SGLANG_API_KEY", "TRITON_CACHE_DIR", "VLLM_HOST_IP", "HOME"])
def test_secrets_and_places_are_no_part_of_it(
    surroundings: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = identity(surroundings)
    monkeypatch.setenv(name, "/elsewhere")
    assert identity(surroundings) == before


async def test_an_engine_compiles_into_the_folder_which_is_stored(
    surroundings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CompilingSglang(FakeSglang):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            (Path(os.environ["TRITON_CACHE_DIR"]) / "kernel").write_text("compiled")

    install_module(monkeypatch, "sglang", Engine=CompilingSglang)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    inputs = make_inputs("sglang", surroundings, compile_cache=str(tmp_path / "store"))
    inputs.files.name = "model"  # type: ignore[misc]
    engine = SglangEngine(inputs)
    await engine.start()
    await asyncio.to_thread(until, lambda: archives(tmp_path))
    await engine.stop()
    (archive,) = archives(tmp_path)
    with zipfile.ZipFile(archive) as zipped:
        assert zipped.namelist() == ["triton/kernel"]


def test_engines_without_a_cache_have_none(tmp_path: Path) -> None:
    files: Any = SimpleNamespace(path=tmp_path, name="m")
    for kind, url in (("native", str(tmp_path)), ("vllm", "")):
        settings = Settings(engine=EngineSettings(kind=kind, compile_cache=url))
        assert open_compile_cache(settings, files) is None
