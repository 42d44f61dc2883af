"""Weights of GGUF files and safetensors folders, and refused checkpoints."""

import json
import math
from contextlib import closing

import numpy as np
import pytest

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsFolder
from dynamo.models.checkpoint.weights import open_weights


def test_gguf_and_safetensors_hold_the_same_model(
    write_gguf, model_folder, write_safetensors, arrays
):
    write_safetensors(model_folder / SINGLE_FILE, arrays)
    with open_weights(write_gguf()) as a, open_weights(model_folder) as b:
        assert a.config.norm_eps == pytest.approx(b.config.norm_eps)
        for field in ("hidden_size", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "tied",
                      "context_tokens", "rope_theta", "intermediate_size"):  # fmt: skip
            assert getattr(a.config, field) == getattr(b.config, field), field
        for name, array in arrays.items():
            assert np.array_equal(a.tensor(name), array), name
            assert np.array_equal(b.tensor(name), array), name
        assert a.rope_divisors().tolist() == [1.0] * 4


def test_sharded_bfloat16_weights_are_read(model_folder, write_safetensors, arrays):
    names = sorted(arrays)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in shards.items():
        write_safetensors(model_folder / file, {name: arrays[name] for name in own}, bf16=True)
    weight_map = {name: file for file, own in shards.items() for name in own}
    (model_folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with open_weights(model_folder) as weights:
        for name in names:
            assert np.allclose(weights.tensor(name), arrays[name], rtol=1e-2)
    (model_folder / "b.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match=r"lacks b\.safetensors"):
        open_weights(model_folder)


def test_the_hint_names_engines_without_weights(model_folder):
    with pytest.raises(ModelUnavailable, match="no weights") as caught:
        open_weights(model_folder)
    assert "mock" in caught.value.hint


@pytest.mark.parametrize("size", [0, 5, 8, 60, 3000])
def test_truncated_safetensors_are_refused(model_folder, write_safetensors, arrays, size):
    path = model_folder / SINGLE_FILE
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
def test_a_wrong_safetensors_header_is_refused(model_folder, entry):
    head = json.dumps({"x": entry}).encode()
    (model_folder / SINGLE_FILE).write_bytes(len(head).to_bytes(8, "little") + head + bytes(16))
    with pytest.raises(ModelUnavailable, match="damaged"):
        SafetensorsFolder(model_folder)


def test_unsupported_number_types_are_refused_on_access(model_folder):
    entry = {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}
    head = json.dumps({"x": entry}).encode()
    (model_folder / SINGLE_FILE).write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    with (
        closing(SafetensorsFolder(model_folder)) as files,
        pytest.raises(ModelUnavailable, match="I64"),
    ):
        files.tensor("x")


def test_unsupported_architectures_are_named(write_gguf, model_folder, write_safetensors, arrays):
    with pytest.raises(ModelUnavailable, match="'mamba'"):
        open_weights(write_gguf({"general.architecture": "mamba"}))
    write_safetensors(model_folder / SINGLE_FILE, arrays)
    change(model_folder, model_type="bert")
    with pytest.raises(ModelUnavailable, match="'bert'"):
        open_weights(model_folder)


def test_a_config_without_required_fields_is_refused(
    write_gguf, model_folder, write_safetensors, arrays
):
    with pytest.raises(ModelUnavailable, match="num_layers"):
        open_weights(write_gguf({"llama.block_count": None}))
    write_safetensors(model_folder / SINGLE_FILE, arrays)
    (model_folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelUnavailable, match="usable model"):
        open_weights(model_folder)


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_llama3_rope_scaling(model_folder, write_safetensors, arrays):
    """Divisors equal the formula in transformers' `_compute_llama3_parameters`."""
    write_safetensors(model_folder / SINGLE_FILE, arrays)
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
    assert len({round(divisor, 3) for divisor in expected}) > 2


def test_linear_rope_scaling_and_refused_kinds(model_folder, write_safetensors, arrays, write_gguf):
    write_safetensors(model_folder / SINGLE_FILE, arrays)
    change(model_folder, rope_scaling={"type": "linear", "factor": 2.0})
    with open_weights(model_folder) as weights:
        assert weights.rope_divisors().tolist() == [2.0] * 4
    change(model_folder, rope_scaling={"type": "mrope", "factor": 2.0})
    with pytest.raises(ModelUnavailable, match="mrope"):
        open_weights(model_folder)
    path = write_gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    with open_weights(path) as weights:
        assert weights.rope_divisors().tolist() == [4.0] * 4


def test_tensors_of_wrong_shape_are_refused(write_gguf, model_folder, write_safetensors, arrays):
    for part, shape in (
        ("model.layers.0.self_attn.q_proj", (31, 32)),
        ("model.layers.1.self_attn.k_proj", (32, 32)),
        ("model.layers.1.mlp.down_proj", (64, 32)),
        ("model.embed_tokens", (len(arrays["model.embed_tokens.weight"]) - 1, 32)),
        ("model.norm", (1,)),
    ):
        name = f"{part}.weight"
        write_safetensors(model_folder / SINGLE_FILE, arrays | {name: np.zeros(shape, np.float32)})
        with open_weights(model_folder) as weights, pytest.raises(ModelUnavailable) as caught:
            weights.tensor(name)
        assert name in caught.value.message
        assert str(shape) in caught.value.message
    path = write_gguf({"llama.attention.head_count_kv": 1})
    with open_weights(path) as weights, pytest.raises(ModelUnavailable, match="k_proj"):
        weights.tensor("model.layers.0.self_attn.k_proj.weight")
    embedding = arrays["model.embed_tokens.weight"]
    tensors = {
        "token_embd.weight": (0, embedding.shape, embedding.tobytes()),
        "rope_freqs.weight": (0, (3,), bytes(12)),
    }
    with (
        open_weights(write_gguf({}, tensors)) as weights,
        pytest.raises(ModelUnavailable, match="rope_freqs"),
    ):
        weights.rope_divisors()


def test_unsupported_model_features_are_refused(
    write_gguf, model_folder, write_safetensors, arrays
):
    """Parts of layers that the type does not have, and other activations, would give wrong
    tokens."""
    for part in ("mlp.up_proj.bias", "self_attn.q_norm.weight", "mlp.experts.0.w1.weight"):
        extra = {f"model.layers.0.{part}": np.zeros(32, np.float32)}
        write_safetensors(model_folder / SINGLE_FILE, arrays | extra)
        with pytest.raises(ModelUnavailable, match=part):
            open_weights(model_folder)
    embedding = arrays["model.embed_tokens.weight"]
    experts = {
        "token_embd.weight": (0, embedding.shape, embedding.tobytes()),
        "blk.0.ffn_gate_exps.weight": (0, (32,), bytes(128)),
    }
    with pytest.raises(ModelUnavailable, match="ffn_gate_exps"):
        open_weights(write_gguf({}, experts))
    write_safetensors(model_folder / SINGLE_FILE, arrays)
    change(model_folder, hidden_act="gelu")
    with pytest.raises(ModelUnavailable, match="gelu"):
        open_weights(model_folder)
    change(model_folder, hidden_act="silu")
    change(model_folder, rope_parameters="x")
    with pytest.raises(ModelUnavailable, match="rope"):
        open_weights(model_folder)


def test_an_untied_model_needs_its_output_matrix(model_folder, write_safetensors, arrays):
    write_safetensors(model_folder / SINGLE_FILE, arrays)
    change(model_folder, tie_word_embeddings=None)
    with open_weights(model_folder) as weights:
        assert weights.config.tied
    change(model_folder, tie_word_embeddings=False)
    with open_weights(model_folder) as weights:
        assert not weights.config.tied
        with pytest.raises(ModelUnavailable, match="lm_head"):
            weights.tensor("lm_head.weight")


def test_stored_tensors_are_those_of_the_file_and_not_copied(
    model_folder, write_safetensors, arrays
):
    write_safetensors(model_folder / SINGLE_FILE, arrays, bf16=True)
    name = "model.layers.0.mlp.up_proj.weight"
    with open_weights(model_folder) as weights:
        stored = weights.stored(name)
        assert (stored.dtype, stored.flags.owndata) == (np.uint16, False)
        with pytest.raises(ValueError, match="read-only"):
            stored[0, 0] = 1
        copied = weights.tensor(name)
        assert np.array_equal(copied.view(np.uint32) >> 16, stored)
        copied[0, 0] += 1
    assert stored.shape == arrays[name].shape


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({"model_type": "qwen3_moe"}, "architecture 'qwen3_moe'", "out=vllm other folders"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq has packed", "out=vllm serves"),
        ({"hidden_act": "relu2"}, "activation 'relu2'", "out=vllm serves"),
    ],
    ids=str,
)
def test_a_model_that_native_does_not_compute_is_one_line(
    model_folder, write_safetensors, arrays, fields, message, hint
):
    write_safetensors(model_folder / SINGLE_FILE, arrays)
    path = model_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ModelUnavailable, match=message) as caught:
        open_weights(model_folder)
    assert "\n" not in caught.value.message + (caught.value.hint or "")
    assert hint in (caught.value.hint or "")


def test_a_part_that_native_does_not_compute_is_named(model_folder, write_safetensors, arrays):
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    write_safetensors(model_folder / SINGLE_FILE, arrays | {name: arrays["model.norm.weight"]})
    with pytest.raises(ModelUnavailable, match=r"does not compute mlp\.experts\.0") as caught:
        open_weights(model_folder)
    assert "out=vllm folders" in caught.value.hint
