"""Shapes of models from their config.json."""

from __future__ import annotations

import pytest

from dynamo.core.errors import ConfigError
from dynamo.operations.configure.catalogue import (
    engines,
    family_of,
    find_gpu,
    find_model,
    gpus,
    models,
)
from dynamo.operations.configure.shapes import read_shape

DENSE = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("name", "billions", "active", "kv_bytes"),
    [
        ("meta-llama/Llama-3.1-8B", 8.03, 7.5, 131072),
        ("meta-llama/Llama-3.1-405B", 405.9, 403.7, 516096),
        ("Qwen/Qwen3-30B-A3B", 30.5, 3.0, 98304),
        ("openai/gpt-oss-120b", 116.8, 5.1, 36864),
        ("deepseek-ai/DeepSeek-R1", 671.0, 36.6, 70272),
        ("Qwen/Qwen3.5-397B-A17B", 396.3, 16.3, 30720),
    ],
)
def test_weights_and_kv_are_those_that_the_makers_publish(
    name: str, billions: float, active: float, kv_bytes: int
) -> None:
    shape = models()[name]

    assert shape.weights / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_weights / 1e9 == pytest.approx(active, rel=0.02)
    assert shape.kv_bytes_per_token("bf16") == kv_bytes


def test_sliding_and_linear_layers_are_counted_apart() -> None:
    mixed = ["full_attention", "sliding_attention", "linear_attention", "linear_attention"] * 8
    shape = read_shape({**DENSE, "layer_types": mixed, "sliding_window": 128}, "mixed")

    assert (shape.full_layers, shape.sliding_layers, shape.window) == (8, 8, 128)


@pytest.mark.parametrize(
    ("quantised", "precision"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"num_bits": 8}}}, "int8"),
    ],
)
def test_the_precision_is_read(quantised: dict[str, object], precision: str) -> None:
    assert read_shape({**DENSE, "quantization_config": quantised}, "q").precision == precision


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"num_hidden_layers": float("nan")}, "num_hidden_layers is nan"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_key_value_heads": 5}, "do not share 5 KV heads"),
        ({"quantization_config": {"quant_method": "new"}}, "unknown quantization_config"),
        ({"text_config": 3}, "text_config is no object"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_shape({**DENSE, **changes}, "broken")


def test_names_are_forgiving_and_wrong_ones_get_the_nearest() -> None:
    assert find_model("nvidia/Llama-3.1-8B-Instruct-FP8").precision == "fp8"
    assert find_model("deepseek-ai/DeepSeek-V3").name == "deepseek-ai/DeepSeek-R1"
    assert family_of(read_shape(DENSE, "mine")) == "meta-llama/Llama-3.1-8B"
    with pytest.raises(ConfigError) as refused:
        find_gpu("h100")
    assert "h100_sxm" in refused.value.hint
    with pytest.raises(ConfigError) as refused:
        find_model("Qwen/Qwen3-33B")
    assert "Qwen/Qwen3-32B" in refused.value.hint


def test_the_data_files_are_complete() -> None:
    assert {gpu.domain for gpu in gpus().values()} == {"hopper", "blackwell", "grace"}
    assert set(engines()) == {"vllm", "sglang", "trtllm"}
    assert len(models()) >= 20
