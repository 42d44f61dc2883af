"""Every architecture against transformers: 5 prompts, 64 greedy tokens each, on random weights.

The weights follow from the names and shapes of the tensors, as in `scripts/shapes_oracle.py`, which
creates the references again (`make oracle`). Each step gets the reference's own tokens. The most
likely next token may differ only if the reference's two best logits are closer than NEAR_TIE.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.inference_native.conftest import write_safetensors
from tests.unit.inference_native.test_decoder import ForwardHarness

from dynamo.models.checkpoint.architectures import ARCHITECTURES, read_config
from dynamo.models.checkpoint.weights import open_weights

NEAR_TIE = 1e-3
VOCABULARY = 160
PROMPT_LENGTHS = (1, 7, 40, 90, 150)
DATA = Path(__file__).parents[2] / "data" / "oracle" / "shapes.json"
CASES = {case["name"]: case for case in json.loads(DATA.read_text())["cases"]}


def random_tensor(name: str, shape: list[int]) -> np.ndarray[Any, Any]:
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    spread, middle = (0.3, 0.0) if len(shape) > 1 else (0.2, 0.0 if "bias" in name else 0.8)
    return (generator.standard_normal(shape) * spread + middle).astype(np.float32)


def random_prompts(name: str) -> list[list[int]]:
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    return [generator.integers(0, VOCABULARY, length).tolist() for length in PROMPT_LENGTHS]


def write_model(folder: Path, case: dict[str, Any], config: str = "saved") -> Path:
    tensors = {name: random_tensor(name, shape) for name, shape in case["tensors"].items()}
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(case[config]))
    return folder


def test_every_architecture_has_a_case() -> None:
    kinds = {case["given"]["model_type"].removesuffix("_text") for case in CASES.values()}
    assert kinds == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CASES)
def test_both_forms_of_a_configuration_describe_the_same_model(tmp_path: Path, name: str) -> None:
    configs = []
    for form in ("given", "saved"):
        folder = tmp_path / form
        folder.mkdir()
        with open_weights(write_model(folder, CASES[name], form)) as weights:
            configs.append(weights.config)
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", CASES)
def test_greedy_answers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    harness = ForwardHarness(write_model(tmp_path, case), threads=1)
    try:
        check_answers(harness, random_prompts(name), case["answers"])
    finally:
        harness.backend.stop()


def check_answers(
    harness: ForwardHarness, prompts: list[list[int]], answers: list[dict[str, Any]]
) -> None:
    """Compute the prompts in two chunks each, then all answers together, token by token."""
    logits = []
    for slot, prompt in enumerate(prompts):
        cut = len(prompt) * 2 // 3
        if cut:
            harness.step((slot, 0, prompt[:cut]))
        logits.append(harness.step((slot, cut, prompt[cut:]))[0])
    for step in range(len(answers[0]["ids"])):
        for row, answer in zip(logits, answers, strict=True):
            if answer["gaps"][step] > NEAR_TIE:
                assert int(row.argmax()) == answer["ids"][step], f"token {step}"
        logits = list(
            harness.step(
                *(
                    (slot, len(prompt) + step, [answer["ids"][step]])
                    for slot, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
                )
            )
        )


def test_a_near_tie_is_rare() -> None:
    gaps = [gap for case in CASES.values() for answer in case["answers"] for gap in answer["gaps"]]
    assert sum(gap < NEAR_TIE for gap in gaps) < len(gaps) / 50


def test_read_config_refuses_wrong_types(tmp_path: Path) -> None:
    from dynamo.core.errors import ModelUnavailable

    for field, value in (
        ("layer_types", ["linear_attention"] * CASES["granite"]["given"]["num_hidden_layers"]),
        ("logits_scaling", "x"), ("attention_multiplier", [1]), ("hidden_act", "relu2"),
        ("hidden_size", "64"), ("num_hidden_layers", 1 << 40), ("rope_scaling", {"rope_type": 5}),
        ("rope_scaling", {"rope_type": "yarn", "factor": "4"}), ("head_dim", 7),
        ("rope_scaling", {"rope_type": "longrope"}),
    ):  # fmt: skip
        path = tmp_path / "config.json"
        path.write_text(json.dumps(CASES["granite"]["given"] | {field: value}))
        with pytest.raises(ModelUnavailable):
            read_config(path, frozenset())


def test_gemma_3_of_text_and_images_leaves_its_defaults_out(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "model_type": "gemma3_text", "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    config = read_config(path, frozenset())
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.context_tokens) == (262_208, 131_072)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, ()),
        ({"use_sliding_window": True}, (0,) * 28 + (16,) * 2),
        ({"use_sliding_window": True, "max_window_layers": 29}, (0,) * 29 + (16,)),
    ],
    ids=["not asked for", "default", "last"],
)
def test_the_last_layers_of_qwen_have_windows_if_asked(
    tmp_path: Path, name: str, fields: dict[str, Any], windows: tuple[int, ...]
) -> None:
    config = {key: value for key, value in CASES[name]["given"].items() if "window" not in key}
    config |= {"sliding_window": 16, "num_hidden_layers": 30} | fields
    config.pop("layer_types", None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert read_config(path, frozenset()).windows == windows


@pytest.mark.parametrize("name", ["gemma3", "mistral-window", "smollm3"])
def test_a_wrong_number_of_layers_is_refused_at_once(tmp_path: Path, name: str) -> None:
    from dynamo.core.errors import ModelUnavailable

    path = tmp_path / "config.json"
    for layers in (0, -1, 1 << 40, 1 << 70):
        path.write_text(json.dumps(CASES[name]["given"] | {"num_hidden_layers": layers}))
        with pytest.raises(ModelUnavailable):
            read_config(path, frozenset())
