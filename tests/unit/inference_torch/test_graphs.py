"""Steps that are padded for a graph, computed again instead of replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.inference_torch.test_torch_shapes import BLOCK_TOKENS, BLOCKS, BlockHarness

pytest.importorskip("triton", reason="make test-torch installs Triton")
pytestmark = pytest.mark.timeout(480)  # 10 s if nothing else runs: Triton's interpreter


@pytest.fixture
def graph_harness(tiny_llama: Path, few_programs: None) -> BlockHarness:
    """A model that computes its steps by graphs where it can."""
    from dynamo.inference.torch.graphs import DecodeGraphs

    harness: Any = BlockHarness(tiny_llama)
    harness.backend.attention.uses_kernels = True  # the plain path reads lengths of the host
    sizes = 5, BLOCKS, 6 * BLOCKS - 1, BLOCK_TOKENS
    forward = harness.model.forward
    graphs = DecodeGraphs(forward, *sizes, harness.device, capture=lambda compute: compute)
    harness.graph_steps = []

    def run(batch: Any) -> Any:
        logits = graphs.run(batch)
        if logits is None:
            return forward(batch)
        harness.graph_steps.append(len(batch.spans))
        return logits

    harness.model.forward = run
    return harness


def test_padded_steps_have_the_logits_of_plain_ones(tiny_llama: Path, graph_harness: Any) -> None:
    plain = BlockHarness(tiny_llama)
    prompts = {number: list(range(number, 4 * number + 3)) for number in range(1, 4)}
    steps: list[list[tuple[int, int, list[int]]]] = [
        [(number, 0, ids) for number, ids in prompts.items()],
        [(number, len(ids), [7]) for number, ids in prompts.items()],
        [(1, len(prompts[1]) + 1, [8])],
        [(2, len(prompts[2]) + 1, [8]), (3, len(prompts[3]) + 1, [9])],
        [(0, 0, [5]), (1, len(prompts[1]) + 2, [8, 9])],
    ]
    for step in steps:
        actual, expected = graph_harness.step(*step), plain.step(*step)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
    assert graph_harness.graph_steps == [3, 1, 2]
