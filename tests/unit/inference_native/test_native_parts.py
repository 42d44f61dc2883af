"""Areas and blocks, rows of a step, threads, sizes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.core.errors import ConfigError, ModelUnavailable
from dynamo.core.settings.schema import EngineSettings as EngineSettings
from dynamo.inference.native.blas import set_blas_threads
from dynamo.inference.native.engine_sizing import (
    available_memory_bytes,
    plan_engine_info,
    usable_cores,
)
from dynamo.inference.native.kv_storage import KvShape, KvStorage
from dynamo.inference.native.ragged import DecodeRun, PrefillSpan, SlotChunk, make_ragged_batch
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.native.thread_pool import ThreadPool
from dynamo.models.checkpoint.llama_config import LlamaConfig
from dynamo.models.checkpoint.weights import SafetensorsWeights

SHAPE = KvShape(2, 3, 8)


def slots_of(num_blocks: int = 8) -> KvStorage:
    return KvStorage(
        SHAPE, max_num_seqs=3, context_tokens=64, num_blocks=num_blocks, block_tokens=4
    )


def test_blocks_come_back_as_they_were_saved() -> None:
    slots = slots_of()
    first, second = slots.allocate_slot(), slots.allocate_slot()
    area = slots.areas[first]
    area[:, :, :, :12] = np.random.default_rng(0).random(area[:, :, :, :12].shape)
    slots.save_blocks(first, [(0, 5), (1, 2), (2, 7)])
    slots.load_blocks(second, [5, 2, 7])
    assert (slots.areas[second][:, :, :, :12] == area[:, :, :, :12]).all()
    assert not slots.areas[second][:, :, :, 12:].any()


def test_the_lowest_free_slot_is_taken() -> None:
    slots = slots_of()
    assert [slots.allocate_slot() for _ in range(3)] == [0, 1, 2]
    slots.free_slot(2)
    slots.free_slot(0)
    assert slots.allocate_slot() == 0


def test_idle_areas_give_their_memory_back() -> None:
    slots = slots_of(num_blocks=16)
    taken = [slots.allocate_slot() for _ in range(3)]
    for slot in taken:
        slots.mark_used(slot, 12)
        slots.areas[slot] = 1.0
    slots.free_slot(taken[0])
    assert slots.areas[taken[0]].all()
    slots.free_slot(taken[1])
    assert not slots.areas[:2].any()
    assert slots.areas[taken[2]].all()


@pytest.mark.parametrize("seqs", [1 << 20, 1 << 60])
def test_too_much_address_space_is_refused_with_a_hint(seqs: int) -> None:
    with pytest.raises(ConfigError, match="address space") as caught:
        KvStorage(SHAPE, max_num_seqs=seqs, context_tokens=1 << 24, num_blocks=1, block_tokens=4)
    assert "--max-num-seqs" in caught.value.hint


@pytest.mark.parametrize("blocks", [1 << 40, 1 << 62])
def test_too_many_blocks_are_refused_with_a_hint(blocks: int) -> None:
    with pytest.raises(ConfigError, match="MiB of memory for KV blocks") as caught:
        slots_of(num_blocks=blocks)
    assert "--num-blocks" in caught.value.hint


def test_rows_are_decoding_sequences_by_slot_then_prompts() -> None:
    work = [
        SlotChunk(4, 9, [40], True),
        SlotChunk(7, 2, [70, 71, 72], True),
        SlotChunk(2, 5, [20], True),
        SlotChunk(3, 6, [30], False),
    ]
    got = make_ragged_batch(work)
    assert got.token_ids.tolist() == [20, 30, 40, 70, 71, 72]
    assert got.positions.tolist() == [5, 6, 9, 2, 3, 4]
    assert got.decode_slots.tolist() == [2, 3, 4]
    assert got.decode_parts == ((DecodeRun(0, 3, 2, 10),),)
    assert got.prefill_spans == (PrefillSpan(3, 6, 7, 2),)
    assert got.sampled_rows.tolist() == [2, 5, 0]


def test_runs_end_at_gaps_and_where_padding_would_cost_more() -> None:
    work = [SlotChunk(slot, start, [0], True) for slot, start in ((0, 9), (1, 9), (3, 9), (4, 900))]
    assert make_ragged_batch(work).decode_parts == (
        (DecodeRun(0, 2, 0, 10), DecodeRun(2, 3, 3, 10), DecodeRun(3, 4, 4, 901)),
    )


def test_parts_weigh_about_the_same() -> None:
    work = [
        SlotChunk(slot, length, [0], True) for slot, length in enumerate([4000, 1500, 1500, 1000])
    ]
    parts = make_ragged_batch(work, 2).decode_parts
    assert [sum(run.length * (run.high - run.low) for run in part) for part in parts] == [
        4001,
        1501 * 2 + 1001,
    ]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_crew_does_every_row_once(threads: int) -> None:
    crew = ThreadPool(threads)
    done = np.zeros(100, int)
    names = set()

    def work(low: int, high: int) -> None:
        done[low:high] += 1
        names.add(threading.current_thread().name)

    crew.split_rows(100, 10, work)
    crew.split_rows(100, 60, work)
    assert (done == 2).all()
    assert 1 <= len(names) <= 2
    crew.stop()


def test_a_crew_raises_what_a_thread_raised_and_goes_on() -> None:
    crew = ThreadPool(2)

    def fail() -> None:
        raise ValueError("here")

    def fine() -> None:
        pass

    with pytest.raises(ValueError, match="here"):
        crew.run_jobs([fine, fail])
    with pytest.raises(ValueError, match="here"):
        crew.run_jobs([fail, fine])
    crew.run_jobs([fine, fine])
    crew.stop()


CONFIG = LlamaConfig(48, 96, 2, 6, 3, 8, 320, 4096, 1e-5, 1e4)


def test_sizes_follow_settings_and_memory() -> None:
    info = plan_engine_info(EngineSettings(num_blocks=10, block_size=8), CONFIG, SHAPE, 0)
    assert (info.num_blocks, info.block_tokens, info.context_tokens) == (10, 8, 80)
    free = plan_engine_info(EngineSettings(), CONFIG, SHAPE, 1024)
    assert free.context_tokens == 1024
    assert 1 <= free.num_blocks <= 64 * 64
    assert free.num_blocks * 16 * SHAPE.token_bytes <= available_memory_bytes()


def test_memory_is_what_a_container_leaves(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("900000000\n")
    (tmp_path / "memory.stat").write_text("anon 100000000\ninactive_file 700000000\nfile 9\n")
    (tmp_path / "memory.max").write_text("1000000000\n")
    assert available_memory_bytes(tmp_path) == 800_000_000
    (tmp_path / "memory.max").write_text("100\n")
    assert available_memory_bytes(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 0
    assert available_memory_bytes(tmp_path / "none") > 0


async def test_weights_that_do_not_fit_say_so(tiny_llama: Path) -> None:
    class Large(SafetensorsWeights):
        def tensor(self, name: str) -> Any:
            raise MemoryError("Unable to allocate 3 TiB")

    runner = NativeRunner(lambda: Large(tiny_llama), EngineSettings(num_blocks=4))
    with pytest.raises(ModelUnavailable, match="3 TiB"):
        await runner.start()
    await runner.stop()


def test_threads_of_the_matrix_products_can_be_set() -> None:
    assert set_blas_threads(usable_cores())
