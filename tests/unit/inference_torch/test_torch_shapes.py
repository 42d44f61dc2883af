"""Every architecture in PyTorch against transformers, as `inference_native/test_shapes.py` does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.inference_native.test_shapes import (
    CASES,
    check_answers,
    random_prompts,
    write_model,
)

from dynamo.inference.model_runner import StepChunk
from dynamo.inference.native.decoder import DecoderModel
from dynamo.models.checkpoint.weights import open_weights

pytest.importorskip("torch", reason="make test-torch installs PyTorch")

BLOCK_TOKENS, BLOCKS = 8, 40
"""Each sequence has so many blocks, in a mixed order."""


class BlockHarness:
    """A model on blocks of NaN. Steps are given as (sequence, start, ids)."""

    def __init__(self, folder: Path) -> None:
        import torch

        from dynamo.inference.torch.backend import TorchBackend

        self.device = torch.device("cpu")
        with open_weights(folder) as weights:
            config = weights.config
            self.backend = TorchBackend(config, weights.rotary(), self.device, torch.float32)
            dims = (config.num_layers, 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim)
            self.backend.attention.kv_blocks = torch.full((6 * BLOCKS, *dims), torch.nan)
            self.model = DecoderModel(weights, self.backend)
        order = np.random.default_rng(5).permutation(6 * BLOCKS).reshape(6, BLOCKS).tolist()
        self.tables = [[SimpleNamespace(id=block) for block in table] for table in order]

    def step(self, *parts: tuple[int, int, list[int]]) -> Any:
        """Return the logits of the last position of every part."""
        import torch

        from dynamo.inference.torch.batch import make_paged_batch

        chunks: list[Any] = []
        for number, start, ids in parts:
            tokens = np.concatenate((np.zeros(start, np.int64), ids)).astype(np.int64)
            sequence: Any = SimpleNamespace(tokens=tokens)
            chunks.append(
                StepChunk(sequence, start, len(ids), True, blocks=self.tables[number])  # type: ignore[arg-type]
            )
        with torch.inference_mode():
            return self.model.forward(make_paged_batch(chunks, BLOCK_TOKENS, self.device)).numpy()


@pytest.mark.parametrize("name", CASES)
def test_greedy_answers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    harness: Any = BlockHarness(write_model(tmp_path, case))
    check_answers(harness, random_prompts(name), case["answers"])
