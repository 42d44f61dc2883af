"""LoRA adapters of a vLLM engine: loading, replacing, and what requests of them share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.external_inputs import make_inputs
from tests.support.fake_lora import FakeLoraLlm, install_lora, write_adapter

from dynamo.core.adapters import adapter_name
from dynamo.core.errors import ConfigError, InvalidRequest, ModelNotFound, NotFound
from dynamo.core.hashing import adapter_salt
from dynamo.inference.engines.arguments import engine_arguments
from dynamo.inference.engines.lora_adapters import parse_lora_modules
from dynamo.inference.vllm.engine import VllmAdapters, VllmEngine


@pytest.fixture
def llm() -> FakeLoraLlm:
    return FakeLoraLlm()


@pytest.fixture
def adapters(llm: FakeLoraLlm, monkeypatch: pytest.MonkeyPatch) -> VllmAdapters:
    install_lora(monkeypatch)
    return VllmAdapters(llm)


async def test_an_adapter_is_found_by_its_id_until_it_is_unloaded(
    adapters: VllmAdapters, llm: FakeLoraLlm, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "sql")
    await adapters.load("sql", path)
    await adapters.load("sql", path)  # the same again
    ((adapter, loaded),) = adapters.paths.items()
    assert (adapter_name(adapter), loaded) == ("sql", path)
    assert adapters.find(adapter) == (adapter, 1, path)
    assert list(llm.loaded) == [1]
    await adapters.unload("sql")
    assert (adapters.paths, llm.loaded) == ({}, {})
    with pytest.raises(ModelNotFound, match="'sql' is not loaded"):
        adapters.find(adapter)
    with pytest.raises(NotFound, match="no LoRA adapter 'sql'"):
        await adapters.unload("sql")


async def test_a_folder_that_cannot_be_read_is_refused(adapters: VllmAdapters) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: File name too long"):
        await adapters.load("sql", "/" + 5000 * "x")


async def test_other_weights_under_a_name_are_another_adapter(
    adapters: VllmAdapters, llm: FakeLoraLlm, tmp_path: Path
) -> None:
    first, second = write_adapter(tmp_path / "1"), write_adapter(tmp_path / "2", b"other")
    await adapters.load("sql", first)
    (old,) = adapters.paths
    with pytest.raises(InvalidRequest, match="another LoRA adapter 'sql' is loaded from"):
        await adapters.load("sql", second)
    await adapters.load("sql", second, replace=True)
    (new,) = adapters.paths
    assert new != old
    assert [request.lora_name for request in llm.loaded.values()] == [old, new]
    assert adapters.find(old).lora_path == first
    third = write_adapter(tmp_path / "3", b"third")
    await adapters.load("sql", third, replace=True)
    assert list(adapters.replaced) == [new]
    assert [request.lora_path for request in llm.loaded.values()] == [second, third]
    await adapters.load("sql", second, replace=True)  # the replaced one again
    assert list(adapters.paths) == [new]
    assert [request.lora_path for request in llm.loaded.values()] == [third, second]
    await adapters.unload("sql")
    assert (llm.loaded, list(adapters.replaced)) == ({}, [])
    assert len({adapter_salt(old, ""), adapter_salt(new, ""), adapter_salt(new, "a"), "a"}) == 4


async def test_a_folder_that_is_no_adapter_never_reaches_vllm(
    adapters: VllmAdapters, llm: FakeLoraLlm, tmp_path: Path
) -> None:
    for path in (str(tmp_path), "/missing", "org/name"):
        with pytest.raises(InvalidRequest, match=r"is no LoRA adapter: it has no adapter_config"):
            await adapters.load("sql", path)
    with pytest.raises(InvalidRequest, match="rank 64 is greater than max_lora_rank 16"):
        await adapters.load("sql", write_adapter(tmp_path / "broken"))
    assert (adapters.paths, llm.loaded) == ({}, {})


def test_modules_have_the_two_forms_of_vllm() -> None:
    modules = ["a=/x/y=z", '{"name": "b", "path": "/b"}']
    assert list(parse_lora_modules(modules)) == [("a", "/x/y=z"), ("b", "/b")]
    for wrong in ("a", "=x", "a=", "{}", '{"name": 1, "path": "/b"}', "{"):
        with pytest.raises(ConfigError, match="names no LoRA adapter"):
            list(parse_lora_modules([wrong]))


async def test_a_missing_adapter_ends_the_start_before_vllm_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("vLLM must not start")

    monkeypatch.setattr("dynamo.inference.vllm.engine.start_llm", refuse)
    engine = VllmEngine(make_inputs("vllm", tmp_path, lora_modules=("sql=/missing",)))
    with pytest.raises(ConfigError, match="sql: /missing is no LoRA adapter"):
        await engine.start()


def test_adapters_are_an_argument_of_vllm_and_refused_by_other_engines(tmp_path: Path) -> None:
    for setting in ({"lora_modules": ("a=b",)}, {"lora_updates": True}):
        inputs = make_inputs("vllm", tmp_path, **setting)
        assert engine_arguments(inputs.settings) == {"enable_lora": True}
    inputs = make_inputs("native", tmp_path, lora_modules=("a=b",))
    with pytest.raises(ConfigError, match="engine native does not have"):
        engine_arguments(inputs.settings)
