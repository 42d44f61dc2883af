"""Parts of the native engine: areas and blocks, rows of a step, threads, sizes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.core.errors import ConfigError, ModelUnavailable
from dynamo.core.settings.schema import EngineSettings
from dynamo.core.values import EngineInfo
from dynamo.inference.native.blas import set_blas_threads
from dynamo.inference.native.engine_sizing import (
    GROUP_FILES,
    KV_MEMORY_SHARE,
    MIN_KV_TOKENS,
    available_memory_bytes,
    plan_engine_info,
    usable_cores,
)
from dynamo.inference.native.kv_storage import KvShape, KvStorage
from dynamo.inference.native.ragged import DecodeRun, PrefillSpan, SlotChunk, make_ragged_batch
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.native.thread_pool import ThreadPool
from dynamo.models.checkpoint.decoder_config import DecoderConfig
from dynamo.models.checkpoint.weights import SafetensorsWeights

SHAPE = KvShape(2, 3, 8)


def make_storage(num_blocks: int = 8) -> KvStorage:
    return KvStorage(
        SHAPE, max_num_seqs=3, context_tokens=64, num_blocks=num_blocks, block_tokens=4
    )


def test_loaded_blocks_equal_saved_blocks() -> None:
    storage = make_storage()
    first, second = storage.allocate_slot(), storage.allocate_slot()
    area = storage.areas[first]
    area[:, :, :, :12] = np.random.default_rng(0).random(area[:, :, :, :12].shape)
    storage.save_blocks(first, [(0, 5), (1, 2), (2, 7)], 12)
    storage.load_blocks(second, [5, 2, 7], 12)
    assert (storage.areas[second][:, :, :, :12] == area[:, :, :, :12]).all()
    assert not storage.areas[second][:, :, :, 12:].any()


def test_the_lowest_free_slot_is_taken() -> None:
    storage = make_storage()
    assert [storage.allocate_slot() for _ in range(3)] == [0, 1, 2]
    storage.free_slot(2)
    storage.free_slot(0)
    assert storage.allocate_slot() == 0


def test_free_areas_return_their_memory() -> None:
    storage = make_storage(num_blocks=16)
    slots = [storage.allocate_slot() for _ in range(3)]
    for slot in slots:
        storage.mark_used(slot, 12)
        storage.areas[slot] = 1.0
    storage.free_slot(slots[0])
    assert storage.areas[slots[0]].all()
    storage.free_slot(slots[1])
    assert not storage.areas[:2].any()
    assert storage.areas[slots[2]].all()


@pytest.mark.parametrize("seqs", [1 << 20, 1 << 60])
def test_too_much_address_space_is_refused_with_a_hint(seqs: int) -> None:
    with pytest.raises(ConfigError, match="address space") as caught:
        KvStorage(SHAPE, max_num_seqs=seqs, context_tokens=1 << 24, num_blocks=1, block_tokens=4)
    assert "--max-num-seqs" in caught.value.hint


@pytest.mark.parametrize("blocks", [1 << 40, 1 << 62])
def test_too_many_blocks_are_refused_with_a_hint(blocks: int) -> None:
    with pytest.raises(ConfigError, match="MiB of memory for KV blocks") as caught:
        make_storage(num_blocks=blocks)
    assert "--num-blocks" in caught.value.hint


def test_rows_begin_with_decoding_sequences_by_slot() -> None:
    chunks = [
        SlotChunk(4, 9, [40], True),
        SlotChunk(7, 2, [70, 71, 72], True),
        SlotChunk(2, 5, [20], True),
        SlotChunk(3, 6, [30], False),
    ]
    batch = make_ragged_batch(chunks)
    assert batch.token_ids.tolist() == [20, 30, 40, 70, 71, 72]
    assert batch.positions.tolist() == [5, 6, 9, 2, 3, 4]
    assert batch.decode_slots.tolist() == [2, 3, 4]
    assert batch.decode_parts == ((DecodeRun(0, 3, 2, 10),),)
    assert batch.prefill_spans == (PrefillSpan(3, 6, 7, 2),)
    assert batch.sampled_rows.tolist() == [2, 5, 0]


def test_runs_end_at_gaps_and_where_padding_costs_more() -> None:
    chunks = [
        SlotChunk(slot, start, [0], True) for slot, start in ((0, 9), (1, 9), (3, 9), (4, 900))
    ]
    assert make_ragged_batch(chunks).decode_parts == (
        (DecodeRun(0, 2, 0, 10), DecodeRun(2, 3, 3, 10), DecodeRun(3, 4, 4, 901)),
    )


def test_parts_have_about_the_same_weight() -> None:
    chunks = [
        SlotChunk(slot, length, [0], True) for slot, length in enumerate([4000, 1500, 1500, 1000])
    ]
    parts = make_ragged_batch(chunks, 2).decode_parts
    assert [sum(run.length * (run.high - run.low) for run in part) for part in parts] == [
        4001,
        1501 * 2 + 1001,
    ]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_thread_pool_computes_every_row_once(threads: int) -> None:
    thread_pool = ThreadPool(threads)
    visits = np.zeros(100, int)
    names = set()

    def work(low: int, high: int) -> None:
        visits[low:high] += 1
        names.add(threading.current_thread().name)

    thread_pool.split_rows(100, 10, work)
    thread_pool.split_rows(100, 60, work)
    assert (visits == 2).all()
    assert 1 <= len(names) <= 2
    thread_pool.stop()


def test_a_thread_pool_raises_a_job_s_error_and_stays_usable() -> None:
    thread_pool = ThreadPool(2)

    def fail() -> None:
        raise ValueError("here")

    def fine() -> None:
        pass

    with pytest.raises(ValueError, match="here"):
        thread_pool.run_jobs([fine, fail])
    with pytest.raises(ValueError, match="here"):
        thread_pool.run_jobs([fail, fine])
    thread_pool.run_jobs([fine, fine])
    thread_pool.stop()


CONFIG = DecoderConfig(48, 96, 2, 6, 3, 8, 320, 4096, 1e-5, 1e4)


def plan(memory_bytes: int = 1 << 30, context: int = 0, **settings: Any) -> EngineInfo:
    return plan_engine_info(EngineSettings(**settings), CONFIG, SHAPE, context, memory_bytes)


def test_sizes_follow_from_settings() -> None:
    info = plan(num_blocks=10, block_size=8)
    assert (info.num_blocks, info.block_tokens, info.context_tokens) == (10, 8, 80)
    info = plan(context=1024)
    assert (info.num_blocks, info.context_tokens) == (64 * 64, 1024), "more would be of no use"


def test_blocks_take_a_share_of_the_memory_that_the_weights_leave(caplog: Any) -> None:
    weights, rest, block = 4 * CONFIG.count_weights(), 8_000_000, 16 * SHAPE.token_bytes
    with caplog.at_level("INFO"):
        info = plan(weights + rest)
    assert info.num_blocks == int(rest * KV_MEMORY_SHARE) // block
    (record,) = caplog.records
    assert record.fields == {
        "blocks": info.num_blocks,
        "tokens": info.num_blocks * 16,
        "kv_mb": 2,
        "weights_mb": round(weights / 1e6),
        "memory_mb": round((weights + rest) / 1e6),
        "rule": "20% of the memory that the weights leave",
    }


def test_too_little_memory_is_refused_with_the_sizes() -> None:
    default_model = DecoderConfig(576, 1536, 30, 9, 3, 64, 49152, 8192, 1e-5, 1e5, tied=True)
    shape = KvShape(30, 3, 64)
    needed = 4 * default_model.count_weights() + int(
        MIN_KV_TOKENS * shape.token_bytes / KV_MEMORY_SHARE
    )
    settings = EngineSettings()
    info = plan_engine_info(settings, default_model, shape, 0, needed)
    assert (info.num_blocks, info.context_tokens) == (64, 1024)
    with pytest.raises(ConfigError) as raised:
        plan_engine_info(settings, default_model, shape, 0, 600_000_000)
    assert str(raised.value.message) == (
        "the engine has 600 MB of memory and needs 774 MB: 538 MB for the model's weights and "
        "236 MB to compute 1024 tokens of context"
    )
    assert "--num-blocks" in raised.value.hint
    own_choice = EngineSettings(num_blocks=3)
    assert plan_engine_info(own_choice, default_model, shape, 0, 0).num_blocks == 3


def test_all_matrices_of_a_checkpoint_are_counted(tiny_llama: Path) -> None:
    with SafetensorsWeights(tiny_llama) as weights:
        names = [name for name in weights._files.tensors if "norm" not in name]
        assert weights.config.count_weights() == sum(weights.tensor(name).size for name in names)


def group(folder: Path, limit: str, used: int, cache: int, version: int = 2) -> None:
    """Write the files of a memory control group."""
    limit_file, used_file, cache_key = GROUP_FILES[2 - version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 100\n{cache_key} {cache}\nfile 9\n")


def test_available_memory_respects_the_container_s_limit(tmp_path: Path) -> None:
    machine = available_memory_bytes(1, tmp_path / "none", tmp_path / "none")
    assert machine > 10_000_000
    member = tmp_path / "cgroup"
    member.write_text("0::/\n")
    group(tmp_path, "10000000", 9_000_000, 7_000_000)
    assert available_memory_bytes(1, tmp_path, member) == 8_000_000
    assert available_memory_bytes(1, tmp_path, tmp_path / "none") == 8_000_000
    assert available_memory_bytes(2, tmp_path, member) == 5_000_000, "half of the limit"
    group(tmp_path, "100", 9_000_000, 0)
    assert available_memory_bytes(1, tmp_path, member) == 0
    group(tmp_path, "max", 9_000_000, 0)
    assert available_memory_bytes(1, tmp_path, member) > 10_000_000


@pytest.mark.parametrize("limits", [("max", "6000000"), ("6000000", "max"), ("6000000", "8000000")])
def test_the_lowest_limit_of_all_parent_groups_counts(
    tmp_path: Path, limits: tuple[str, str]
) -> None:
    member = tmp_path / "cgroup"
    member.write_text("0::/system.slice/dynamo.service\n")
    group(tmp_path / "system.slice", limits[0], 1_000_000, 0)
    group(tmp_path / "system.slice/dynamo.service", limits[1], 1_000_000, 0)
    assert available_memory_bytes(1, tmp_path, member) == 5_000_000


@pytest.mark.parametrize("path", ["/docker/4711", "/"])
def test_groups_of_version_1_are_read(tmp_path: Path, path: str) -> None:
    member = tmp_path / "cgroup"
    member.write_text(f"5:cpu,cpuacct:/x\n4:memory:{path}\n0::/\n")
    group(tmp_path / "memory", "6000000", 1_000_000, 500_000, version=1)  # the container's root
    assert available_memory_bytes(1, tmp_path, member) == 5_500_000


async def test_weights_that_do_not_fit_are_reported(tiny_llama: Path) -> None:
    class Large(SafetensorsWeights):
        def stored(self, name: str) -> Any:
            raise MemoryError("Unable to allocate 3 TiB")

    runner = NativeRunner(lambda: Large(tiny_llama), EngineSettings(num_blocks=4))
    with pytest.raises(ModelUnavailable, match="3 TiB"):
        await runner.start()
    await runner.stop()


def test_threads_of_the_matrix_products_can_be_set() -> None:
    assert set_blas_threads(usable_cores())
