"""Standby processes that the free memory does not hold are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.host_memory import HostMemory
from dynamo.runtime.processes.standby import with_standbys
from dynamo.services.deployment import memory_needs


def specs(kind: str, standby: int, path: str = "") -> list[ChildSpec]:
    settings = Settings()
    engine = replace(settings.engine, kind=kind, standby=standby)
    settings = replace(settings, engine=engine, model=replace(settings.model, path=path))
    return with_standbys([ChildSpec(role="worker", name="worker", settings=settings)])


def test_a_number_beyond_memory_is_refused_with_the_largest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(memory_needs, "PROCESS_BYTES", 1 << 20)
    monkeypatch.setattr(memory_needs, "available_memory_bytes", lambda: 5 << 20)
    for kind, path, most in (("native", "", 5), ("vllm", str(tmp_path), 2), ("mock", "x", 5)):
        memory_needs.check_standby_memory(specs(kind, most, path))
        with pytest.raises(ConfigError, match="MiB of memory are free") as raised:
            memory_needs.check_standby_memory(specs(kind, most + 1, path))
        assert f"room for {most} in all" in raised.value.hint
    memory_needs.check_standby_memory(specs("vllm", 0, str(tmp_path)))


MIB = 1 << 20
WEIGHTS, TINY_WEIGHTS = 400 * MIB, 40 * MIB


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model named `big` have ten times the weights and the cache of one named `tiny`."""

    def weights_and_cache(settings: Settings) -> tuple[int, int]:
        return {"big": (WEIGHTS, 100 * MIB), "tiny": (TINY_WEIGHTS, 10 * MIB)}.get(
            settings.model.path, (0, 0)
        )

    monkeypatch.setattr(memory_needs, "_weights_and_cache", weights_and_cache)
    monkeypatch.setattr(memory_needs, "PROCESS_BYTES", 0)


def worker(path: str, name: str = "", kind: str = "native", **model: object) -> ChildSpec:
    settings = Settings()
    section = replace(settings.model, path=path, **model)
    engine = replace(settings.engine, kind=kind)
    settings = replace(settings, engine=engine, model=section)
    return ChildSpec(role="worker", name=name or path, settings=settings, model=path)


def shares(specs: list[ChildSpec], limit_bytes: int = 0) -> dict[str, tuple[int, int, int]]:
    """Return own and shared memory and the size of the cache of each process in MiB."""
    return {
        spec.name: (
            spec.memory.own_bytes // MIB,
            spec.memory.shared_bytes // MIB,
            spec.settings.cache.max_cache_size // MIB,
        )
        for spec in memory_needs.with_memory(specs, limit_bytes)
    }


@pytest.mark.usefixtures("sizes")
def test_a_share_of_what_is_left_is_divided_by_need() -> None:
    specs = [
        worker("big"),
        worker("tiny"),
        ChildSpec(role="frontend", name="f", settings=Settings()),
    ]
    limit_bytes = WEIGHTS + TINY_WEIGHTS + 770 * MIB
    assert shares(specs, limit_bytes) == {
        "big": (400, 400, 200),
        "tiny": (40, 40, 20),
        "f": (0, 0, 0),
    }


@pytest.mark.usefixtures("sizes")
def test_without_room_for_more_each_gets_what_it_needs() -> None:
    assert shares([worker("big"), worker("tiny")], MIB) == {
        "big": (200, 400, 100),
        "tiny": (20, 40, 10),
    }


@pytest.mark.usefixtures("sizes")
def test_a_given_size_overrides_the_share() -> None:
    specs = [worker("big"), worker("tiny", memory=240 * MIB), worker("", "m", "mock", memory=MIB)]
    limit_bytes = 440 * MIB + 200 * MIB + MIB + 700 * MIB
    assert shares(specs, limit_bytes) == {
        "big": (400, 400, 200),
        "tiny": (200, 40, 100),
        "m": (1, 0, 0),
    }


@pytest.mark.usefixtures("sizes")
def test_less_memory_than_the_weights_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="memory is 500 MiB, and a worker of big needs 600 MiB"):
        memory_needs.with_memory([worker("big", memory=500 * MIB)])


@pytest.mark.usefixtures("sizes")
def test_an_added_model_is_on_demand_with_what_it_needs_or_sizes_its_own_cache() -> None:
    assert shares([worker("big", load="on_demand")]) == {"big": (200, 400, 100)}
    assert shares([worker("big")]) == {"big": (200, 400, 0)}


@pytest.mark.usefixtures("sizes")
def test_workers_of_a_model_share_its_weights() -> None:
    first, second = memory_needs.with_memory([worker("big", "a"), worker("big", "b")])
    (foreign,) = memory_needs.with_memory([worker("big", "c", "vllm")])
    assert foreign.memory.shared_key == "", "each process loads its own"
    host = HostMemory(800 * MIB)
    assert host.lack_of([first, second], []) == ""
    assert host.lack_of([second], [first]) == ""
    assert "need 600 MiB, and 600 MiB of the 800 MiB" in host.lack_of([foreign], [first])


@pytest.mark.usefixtures("sizes")
def test_what_never_fits_is_refused_at_the_start_with_the_numbers() -> None:
    def limited(mebibytes: int) -> Settings:
        settings = Settings()
        return replace(settings, runtime=replace(settings.runtime, memory=mebibytes * MIB))

    specs = [worker("tiny"), worker("big", load="on_demand")]
    settings, _ = memory_needs.share_memory(limited(660), specs)
    assert settings.runtime.memory == 660 * MIB
    with pytest.raises(ConfigError, match=r"big never fits .* need 600 MiB, and 60 MiB of the 659"):
        memory_needs.share_memory(limited(659), specs)
    always = [worker("tiny"), worker("big")]
    with pytest.raises(ConfigError, match=r"do not fit together: .* need 660 MiB, and 0 MiB"):
        memory_needs.share_memory(limited(659), always)
    assert memory_needs.share_memory(limited(1), [worker("big")])[1][0].memory.own_bytes == 0


def write_model(folder: Path, vocabulary: int, tokenizer: str = "{}") -> None:
    (folder / "tokenizer.json").write_text(tokenizer)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.usefixtures("sizes")
def test_supervisor_and_frontends_get_their_part_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_needs, "host_memory_bytes", lambda: 1000 * MIB)
    others = [
        ChildSpec(role=role, name=role, settings=Settings()) for role in ("frontend", "observer")
    ]
    own_bytes = memory_needs.own_processes_bytes([*others, worker("tiny"), worker("big")])
    assert 160 * MIB <= own_bytes <= 256 * MIB
    settings, _ = memory_needs.share_memory(Settings(), [*others, worker("tiny"), worker("big")])
    assert settings.runtime.memory == 1000 * MIB - own_bytes
    more = [worker("big"), *(worker("big", str(number), memory=600 * MIB) for number in range(2))]
    with pytest.raises(ConfigError, match="do not fit together") as raised:
        memory_needs.share_memory(Settings(), [*others, worker("tiny"), *more])
    assert f"of 1000 MiB, {own_bytes >> 20} MiB are for supervisor" in raised.value.hint


def test_a_tokenizer_counts_once_in_each_frontend(tmp_path: Path) -> None:
    workers = []
    for name, vocabulary, tokenizer in (("a", 1000, "{}"), ("b", 1000, "{}"), ("c", 2000, "{ }")):
        (tmp_path / name).mkdir()
        write_model(tmp_path / name, vocabulary, tokenizer)
        workers.append(worker(str(tmp_path / name), name))
    frontends = [ChildSpec(role="frontend", name=n, settings=Settings()) for n in ("f-1", "f-2")]
    assert memory_needs.own_processes_bytes([*workers, *frontends]) == (
        memory_needs.SUPERVISOR_BYTES
        + 2 * memory_needs.SERVICE_BYTES
        + 2 * 3000 * memory_needs.VOCABULARY_ENTRY_BYTES
    )


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    write_model(tmp_path, 1000)
    settings = worker(str(tmp_path)).settings
    weights, cache_bytes = memory_needs._weights_and_cache(settings)
    assert weights == 4 * (1000 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128))
    assert cache_bytes == 512 * 2 * 2 * 2 * 16 * 4
    short = replace(settings, model=replace(settings.model, context_tokens=16))
    assert memory_needs._weights_and_cache(short) == (weights, cache_bytes // 32)
    mock = replace(settings, engine=replace(settings.engine, kind="mock"))
    assert memory_needs._weights_and_cache(mock) == (0, 0)
    assert memory_needs._weights_and_cache(worker("/nowhere").settings) == (0, 0)
