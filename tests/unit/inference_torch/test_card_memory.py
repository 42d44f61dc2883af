"""Memory that a worker may use of a card, on a card that only has numbers."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema import EngineSettings
from dynamo.inference.native.kv_storage import KvShape
from dynamo.models.checkpoint.decoder_config import DecoderConfig

torch = pytest.importorskip("torch", reason="make test-torch installs PyTorch")

GB = 10**9
CONFIG = DecoderConfig(4096, 14336, 32, 32, 8, 128, 128_256, 8192, 1e-5, 5e5)
SHAPE = KvShape(32, 8, 128, "bfloat16")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `card(free, used)`, which installs a card of 80 GB and the peak of a step."""

    def make(free: int, used: int = 0) -> None:
        numbers = {
            "mem_get_info": (free, 80 * GB), "max_memory_allocated": used, "get_device_name": "H100",
            "reset_peak_memory_stats": None, "synchronize": None, "empty_cache": None,
        }  # fmt: skip
        for name, value in numbers.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)

    return make


def test_the_budget_is_a_share_and_at_most_what_is_free(card: Any) -> None:
    from dynamo.inference.torch.card_memory import card_budget

    card(free=79 * GB)
    assert card_budget(EngineSettings()) == 72 * GB
    assert card_budget(EngineSettings(gpu_memory_utilization=0.45)) == 36 * GB
    assert card_budget(EngineSettings(data_parallel_size=2)) == 36 * GB
    card(free=30 * GB)  # another worker has the rest
    assert card_budget(EngineSettings(gpu_memory_utilization=0.45)) == 30 * GB


def test_blocks_get_what_the_largest_step_leaves(card: Any) -> None:
    from dynamo.inference.torch import card_memory

    card(free=79 * GB, used=20 * GB)
    card_memory.check_weights(CONFIG, SHAPE, 8192, 72 * GB)
    steps: list[int] = []
    room = card_memory.measure_kv_bytes(
        EngineSettings(), SHAPE, 8192, 72 * GB, lambda: steps.append(1)
    )
    assert room == 52 * GB - card_memory.GRAPH_BYTES
    assert steps == [1]


def test_too_little_memory_is_an_error_with_numbers(card: Any) -> None:
    from dynamo.inference.torch import card_memory

    card(free=15 * GB, used=15 * GB)
    with pytest.raises(ConfigError, match=r"weights take 16060 MB in bfloat16 .*15000 of 80000 MB"):
        card_memory.check_weights(CONFIG, SHAPE, 8192, 15 * GB)
    for settings in (EngineSettings(), EngineSettings(num_blocks=100_000)):
        with pytest.raises(ConfigError, match="tokens of context"):
            card_memory.measure_kv_bytes(settings, SHAPE, 8192, 15 * GB, lambda: None)

    def step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError, match="--max-num-batched-tokens does not fit"):
        card_memory.measure_kv_bytes(EngineSettings(), SHAPE, 8192, 15 * GB, step)
