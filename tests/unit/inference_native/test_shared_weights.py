"""Weights that several workers map: prepared once, equal to private ones, never stale."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.shared_memory import MemoryUsers, descriptors
from tests.unit.inference_native.test_native_runner import PROMPTS, generate_all
from tests.unit.inference_native.test_shapes import CASES, write_model

from dynamo.core.settings.schema import EngineSettings
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native.decoder import prepare_weights
from dynamo.inference.native.kv_storage import KvShape, KvStorage
from dynamo.inference.native.numpy_backend import NumpyBackend
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.native.shared_weights import SharedWeights
from dynamo.inference.native.thread_pool import ThreadPool
from dynamo.inference.native.weights_digest import DigestedWeights
from dynamo.models.checkpoint.weights import SafetensorsWeights, open_weights
from dynamo.runtime.shared_memory import SUPPORTED

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
COUNT = 6


@pytest.fixture
async def users() -> AsyncIterator[MemoryUsers]:
    memory_users = MemoryUsers()
    yield memory_users
    memory_users.close()


class CountedWeights(SafetensorsWeights):
    """Weights that count the tensors read of all files."""

    reads = 0

    def _read(self, name: str) -> Any:
        CountedWeights.reads += 1
        return super()._read(name)


class Worker:
    """An engine that shares weights. `reads` counts the tensors that its start read."""

    def __init__(self, folder: Path, users: MemoryUsers, **settings: Any) -> None:
        engine_settings = EngineSettings(
            **{"threads": 2, "num_blocks": 64, "block_size": 4} | settings
        )
        shared = SharedWeights(users.start(), folder)
        self.runner = NativeRunner(
            lambda: CountedWeights(folder), engine_settings, shared_weights=shared
        )
        self.engine = BatchedEngine(self.runner)

    async def answer(self, make_request: Any) -> list[list[int]]:
        """Start, answer all prompts twice, and stop."""
        before = CountedWeights.reads
        await self.engine.start()
        self.reads = CountedWeights.reads - before
        requests = [make_request(prompt, COUNT) for prompt in PROMPTS]
        first = [reply.ids for reply in await generate_all(self.engine, requests)]
        assert [reply.ids for reply in await generate_all(self.engine, requests)] == first
        await self.engine.stop()
        return first


@pytest.fixture
def expected(reference_llama: Any) -> list[list[int]]:
    return [reference_llama.greedy(prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture
async def private_layout(tiny_llama: Path) -> str:
    settings = EngineSettings(threads=2, num_blocks=64, block_size=4)
    runner = NativeRunner(lambda: open_weights(tiny_llama), settings)
    await runner.start()
    await runner.stop()
    return runner.layout


async def test_the_second_worker_reads_no_tensor(
    tiny_llama: Path,
    users: MemoryUsers,
    make_request: Any,
    expected: list[list[int]],
    private_layout: str,
) -> None:
    builder, second = Worker(tiny_llama, users), Worker(tiny_llama, users)
    assert await builder.answer(make_request) == expected
    size = users.broker.size_bytes
    assert await second.answer(make_request) == expected
    assert (builder.reads > 10, second.reads) == (True, 0)
    assert users.broker.size_bytes == size
    assert builder.runner.layout == second.runner.layout == private_layout


async def test_each_number_of_threads_has_its_own_memory(
    tiny_llama: Path, users: MemoryUsers, make_request: Any, expected: list[list[int]]
) -> None:
    sizes = []
    for threads in (2, 1, 2):
        assert await Worker(tiny_llama, users, threads=threads).answer(make_request) == expected
        sizes.append(users.broker.size_bytes)
    assert sizes[0] < sizes[1] == sizes[2]


async def test_a_changed_file_is_read_again(
    tiny_llama: Path, users: MemoryUsers, make_request: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    before = await Worker(folder, users).answer(make_request)
    path = folder / "model.safetensors"
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(np.full(1024, 0.5, np.float32).tobytes())
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = Worker(folder, users)
    assert await changed.answer(make_request) != before
    assert changed.reads > 10


@pytest.mark.parametrize("missing", ["memfd_create", "the supervisor", "seals"])
async def test_without_shared_memory_each_worker_has_its_own_weights(
    tiny_llama: Path,
    users: MemoryUsers,
    make_request: Any,
    expected: list[list[int]],
    private_layout: str,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create = os.memfd_create

    def refuse(name: str, flags: int) -> int:
        if name == "dynamo-weights":
            raise OSError("Function not implemented")
        return create(name, flags)

    if missing == "memfd_create":
        monkeypatch.setattr(os, "memfd_create", refuse)
    elif missing == "seals":
        monkeypatch.setattr("dynamo.inference.native.shared_weights.SEALS", -1)
    workers = [Worker(tiny_llama, users) for _ in range(2)]
    if missing == "the supervisor":
        users.close()
    for worker in workers:
        assert await worker.answer(make_request) == expected
        assert worker.reads > 10
        assert descriptors("dynamo-weights") == 0
        assert worker.runner.layout == private_layout
    assert users.broker.size_bytes == 0


class BuildAlways:
    """Memory that is built for each user."""

    def open(self, key: str, build: Any) -> int:
        del key
        return int(build())


@pytest.mark.parametrize("name", CASES)
def test_every_architecture_is_mapped_as_it_is_prepared(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path, CASES[name])
    memory: Any = BuildAlways()
    with DigestedWeights(open_weights(folder)) as weights:
        config = weights.config
        shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim)
        storage = KvStorage(shape, max_num_seqs=1, context_tokens=8, num_blocks=1, block_tokens=4)
        backend = NumpyBackend(config, weights.rotary(), storage, ThreadPool(2))
        prepared, _ = SharedWeights(memory, folder).load(weights, backend)
        assert prepared is not None
        _assert_equal(prepared, prepare_weights(weights, backend))
        with pytest.raises(ValueError, match="read-only"):
            prepared.embedding.blocks[0] = 0.0
        backend.stop()


def _assert_equal(mapped: Any, private: Any) -> None:
    assert type(mapped) is type(private)
    if isinstance(private, np.ndarray):
        np.testing.assert_array_equal(mapped, private)
    elif isinstance(private, msgspec.Struct):
        for field in private.__struct_fields__:
            _assert_equal(getattr(mapped, field), getattr(private, field))
    elif isinstance(private, tuple):
        assert len(mapped) == len(private)
        for mapped_part, private_part in zip(mapped, private, strict=True):
            _assert_equal(mapped_part, private_part)
    else:
        assert mapped == private
