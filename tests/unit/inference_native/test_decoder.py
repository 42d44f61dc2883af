"""The ragged forward pass against the reference, for every way to cut the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.inference.native import ragged
from dynamo.inference.native.decoder import DecoderModel
from dynamo.inference.native.kv_storage import KvShape, KvStorage
from dynamo.inference.native.numpy_backend import NumpyBackend
from dynamo.inference.native.ragged import SlotChunk, make_ragged_batch
from dynamo.inference.native.thread_pool import ThreadPool
from dynamo.models.checkpoint.weights import open_weights

rng = np.random.default_rng(3)
IDS = rng.integers(0, 320, 150).tolist()


class ForwardHarness:
    """A model with areas. Steps are given as (slot, start, ids)."""

    def __init__(self, folder: Path, threads: int) -> None:
        with open_weights(folder) as weights:
            config = weights.config
            shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim)
            self.kv_storage = KvStorage(
                shape, max_num_seqs=6, context_tokens=256, num_blocks=64, block_tokens=4
            )
            self.threads = threads
            self.backend = NumpyBackend(
                config, weights.rotary(), self.kv_storage, ThreadPool(threads)
            )
            self.model = DecoderModel(weights, self.backend)

    def step(self, *parts: tuple[int, int, list[int]]) -> np.ndarray[Any, Any]:
        """Return the logits of the last position of every part."""
        chunks = [SlotChunk(slot, start, ids, True) for slot, start, ids in parts]
        return self.model.forward(make_ragged_batch(chunks, self.threads)).copy()


@pytest.fixture(params=[1, 2])
def harness(tiny_llama: Path, request: Any) -> Iterator[ForwardHarness]:
    forward = ForwardHarness(tiny_llama, request.param)
    yield forward
    forward.backend.stop()


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-4)


def test_a_prompt_in_one_step(harness: ForwardHarness, reference_llama: Any) -> None:
    assert_close(harness.step((0, 0, IDS))[0], reference_llama.logits(IDS)[-1])


@pytest.mark.parametrize("cuts", [[1], [7, 8], [64], [64, 128], [149], [3, 67, 131]])
def test_a_prompt_in_chunks(
    harness: ForwardHarness, reference_llama: Any, cuts: Sequence[int]
) -> None:
    expected = reference_llama.logits(IDS)
    for low, high in zip([0, *cuts], [*cuts, len(IDS)], strict=True):
        assert_close(harness.step((2, low, IDS[low:high]))[0], expected[high - 1])


def test_token_by_token(harness: ForwardHarness, reference_llama: Any) -> None:
    expected = reference_llama.logits(IDS[:20])
    for position, token in enumerate(IDS[:20]):
        assert_close(harness.step((1, position, [token]))[0], expected[position])


def test_a_mixed_step_keeps_the_order_of_its_chunks(
    harness: ForwardHarness, reference_llama: Any
) -> None:
    lengths = {0: 30, 1: 2, 2: 90, 4: 31, 5: 29}
    for slot, length in lengths.items():
        harness.step((slot, 0, IDS[slot : slot + length - 1]))
    decode = [(slot, length - 1, [IDS[slot + length - 1]]) for slot, length in lengths.items()]
    prompt = (3, 0, IDS[3:40])
    logits = harness.step(decode[4], prompt, *decode[:4])
    expected = [
        reference_llama.logits(IDS[slot : slot + lengths[slot]])[-1] for slot in (5, 0, 1, 2, 4)
    ]
    expected.insert(1, reference_llama.logits(prompt[2])[-1])
    assert_close(logits, expected)


def test_only_sampled_rows_have_logits(harness: ForwardHarness) -> None:
    chunks = [SlotChunk(0, 0, IDS[:5], False), SlotChunk(1, 0, IDS[:1], True)]
    assert harness.model.forward(make_ragged_batch(chunks)).shape == (1, 320)
    assert harness.model.forward(make_ragged_batch(chunks[:1])).shape[0] == 0


def test_attention_of_several_threads(
    harness: ForwardHarness, reference_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged, "MIN_TOKENS_TO_SPLIT", 1)
    for slot in range(3):
        harness.step((slot, 0, IDS[slot : slot + 50 + slot]))
    got = harness.step(*((slot, 50 + slot, [IDS[50 + 2 * slot]]) for slot in range(3)))
    assert_close(
        got, [reference_llama.logits(IDS[slot : slot + 51 + slot])[-1] for slot in range(3)]
    )
