"""The ragged forward pass against the textbook's, however the work is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.inference.native import ragged
from dynamo.inference.native.kv_storage import KvShape, KvStorage
from dynamo.inference.native.llama import LlamaModel
from dynamo.inference.native.numpy_backend import NumpyBackend
from dynamo.inference.native.ragged import SlotChunk, make_ragged_batch
from dynamo.inference.native.thread_pool import ThreadPool
from dynamo.models.checkpoint.weights import open_weights

rng = np.random.default_rng(3)
IDS = [int(one) for one in rng.integers(0, 320, 150)]


class Bench:
    """A model with areas, and steps given as (slot, start, ids)."""

    def __init__(self, folder: Path, threads: int) -> None:
        with open_weights(folder) as weights:
            config = weights.config
            shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim)
            self.slots = KvStorage(
                shape, max_num_seqs=6, context_tokens=256, num_blocks=64, block_tokens=4
            )
            self.threads = threads
            self.arrays = NumpyBackend(
                config, weights.rope_divisors(), self.slots, ThreadPool(threads)
            )
            self.model = LlamaModel(weights, self.arrays)

    def step(self, *parts: tuple[int, int, list[int]]) -> np.ndarray[Any, Any]:
        """Logits of the last position of every part."""
        work = [SlotChunk(slot, start, ids, True) for slot, start, ids in parts]
        return self.model.forward(make_ragged_batch(work, self.threads)).copy()


@pytest.fixture(params=[1, 2])
def bench(tiny_llama: Path, request: Any) -> Iterator[Bench]:
    one = Bench(tiny_llama, request.param)
    yield one
    one.arrays.stop()


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def test_a_prompt_in_one_step(bench: Bench, textbook: Any) -> None:
    close(bench.step((0, 0, IDS))[0], textbook.logits(IDS)[-1])


@pytest.mark.parametrize("cuts", [[1], [7, 8], [64], [64, 128], [149], [3, 67, 131]])
def test_a_prompt_in_chunks(bench: Bench, textbook: Any, cuts: Sequence[int]) -> None:
    want = textbook.logits(IDS)
    for low, high in zip([0, *cuts], [*cuts, len(IDS)], strict=True):
        close(bench.step((2, low, IDS[low:high]))[0], want[high - 1])


def test_token_by_token(bench: Bench, textbook: Any) -> None:
    want = textbook.logits(IDS[:20])
    for position, token in enumerate(IDS[:20]):
        close(bench.step((1, position, [token]))[0], want[position])


def test_prompts_and_decoding_in_one_step_keep_the_order_of_the_work(
    bench: Bench, textbook: Any
) -> None:
    lengths = {0: 30, 1: 2, 2: 90, 4: 31, 5: 29}
    for slot, length in lengths.items():
        bench.step((slot, 0, IDS[slot : slot + length - 1]))
    decode = [(slot, length - 1, [IDS[slot + length - 1]]) for slot, length in lengths.items()]
    prompt = (3, 0, IDS[3:40])
    got = bench.step(decode[4], prompt, *decode[:4])
    want = [textbook.logits(IDS[slot : slot + lengths[slot]])[-1] for slot in (5, 0, 1, 2, 4)]
    want.insert(1, textbook.logits(prompt[2])[-1])
    close(got, want)


def test_only_rows_that_sample_have_logits(bench: Bench) -> None:
    work = [SlotChunk(0, 0, IDS[:5], False), SlotChunk(1, 0, IDS[:1], True)]
    assert bench.model.forward(make_ragged_batch(work)).shape == (1, 320)
    assert bench.model.forward(make_ragged_batch(work[:1])).shape[0] == 0


def test_attention_of_several_threads(
    bench: Bench, textbook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged, "MIN_TOKENS_TO_SPLIT", 1)
    for slot in range(3):
        bench.step((slot, 0, IDS[slot : slot + 50 + slot]))
    got = bench.step(*((slot, 50 + slot, [IDS[50 + 2 * slot]]) for slot in range(3)))
    close(got, [textbook.logits(IDS[slot : slot + 51 + slot])[-1] for slot in range(3)])
