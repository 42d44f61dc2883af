import json
import math

import numpy as np
import pytest

from dynamo.core.errors import ModelUnavailable
from dynamo.models.safetensors import INDEX, SINGLE, SafetensorsFolder
from dynamo.models.weights import open_weights


def test_gguf_and_safetensors_hold_the_same_model(
    write_gguf, model_folder, write_safetensors, arrays
):
    write_safetensors(model_folder / SINGLE, arrays)
    with open_weights(write_gguf()) as a, open_weights(model_folder) as b:
        assert a.config.norm_eps == pytest.approx(b.config.norm_eps)
        for field in ("hidden_size", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "tied",
                      "context_tokens", "rope_theta", "intermediate_size"):  # fmt: skip
            assert getattr(a.config, field) == getattr(b.config, field), field
        for name, array in arrays.items():
            assert np.array_equal(a.tensor(name), array), name
            assert np.array_equal(b.tensor(name), array), name
            assert name in a
            assert name in b
        assert "lm_head.weight" not in a
        assert a.rope_divisors().tolist() == [1.0] * 4


def test_sharded_half_precision(model_folder, write_safetensors, arrays):
    names = sorted(arrays)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in shards.items():
        write_safetensors(model_folder / file, {name: arrays[name] for name in own}, bf16=True)
    weight_map = {name: file for file, own in shards.items() for name in own}
    (model_folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with open_weights(model_folder) as weights:
        for name in names:
            assert np.allclose(weights.tensor(name), arrays[name], rtol=1e-2)
    (model_folder / "b.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match=r"lacks b\.safetensors"):
        open_weights(model_folder)


def test_a_folder_without_weights_says_what_needs_none(model_folder):
    with pytest.raises(ModelUnavailable, match="no weights") as caught:
        open_weights(model_folder)
    assert "mock" in caught.value.hint


@pytest.mark.parametrize("size", [0, 5, 8, 60, 3000])
def test_damaged_safetensors(model_folder, write_safetensors, arrays, size):
    path = model_folder / SINGLE
    write_safetensors(path, arrays)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelUnavailable):
        SafetensorsFolder(model_folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32"},
    ],
)
def test_lies_in_a_safetensors_header(model_folder, entry):
    head = json.dumps({"x": entry}).encode()
    (model_folder / SINGLE).write_bytes(len(head).to_bytes(8, "little") + head + bytes(16))
    with pytest.raises(ModelUnavailable, match="damaged"):
        SafetensorsFolder(model_folder)


def test_other_types_of_numbers_are_refused_when_asked_for(model_folder):
    entry = {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}
    head = json.dumps({"x": entry}).encode()
    (model_folder / SINGLE).write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    with SafetensorsFolder(model_folder) as files, pytest.raises(ModelUnavailable, match="I64"):
        files.tensor("x")


def test_architectures_are_named(write_gguf, model_folder, write_safetensors, arrays):
    with pytest.raises(ModelUnavailable, match="'mamba'"):
        open_weights(write_gguf({"general.architecture": "mamba"}))
    write_safetensors(model_folder / SINGLE, arrays)
    change(model_folder, model_type="bert")
    with pytest.raises(ModelUnavailable, match="'bert'"):
        open_weights(model_folder)


def test_a_config_that_lacks_fields(write_gguf, model_folder, write_safetensors, arrays):
    with pytest.raises(ModelUnavailable, match="num_layers"):
        open_weights(write_gguf({"llama.block_count": None}))
    write_safetensors(model_folder / SINGLE, arrays)
    (model_folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelUnavailable, match="usable model"):
        open_weights(model_folder)


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_llama3_rope_scaling(model_folder, write_safetensors, arrays):
    """Against the formula in transformers' `_compute_llama3_parameters`, one frequency at a time."""
    write_safetensors(model_folder / SINGLE, arrays)
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    change(model_folder, rope_scaling=scaling, rope_theta=100.0)
    expected = []
    for pair in range(4):
        frequency = 100.0 ** (-2 * pair / 8)
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4:
            scaled = frequency
        elif wavelength > 64:
            scaled = frequency / 8
        else:
            smooth = (64 / wavelength - 1) / 3
            scaled = (1 - smooth) * frequency / 8 + smooth * frequency
        expected.append(frequency / scaled)
    with open_weights(model_folder) as weights:
        assert weights.rope_divisors() == pytest.approx(expected)
    assert len({round(one, 3) for one in expected}) > 2


def test_other_rope_scaling(model_folder, write_safetensors, arrays, write_gguf):
    write_safetensors(model_folder / SINGLE, arrays)
    change(model_folder, rope_scaling={"type": "linear", "factor": 2.0})
    with open_weights(model_folder) as weights:
        assert weights.rope_divisors().tolist() == [2.0] * 4
    change(model_folder, rope_scaling={"type": "yarn", "factor": 2.0})
    with pytest.raises(ModelUnavailable, match="yarn"):
        open_weights(model_folder)
    path = write_gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    with open_weights(path) as weights:
        assert weights.rope_divisors().tolist() == [4.0] * 4
