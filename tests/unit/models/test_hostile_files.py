"""Files of a model that nest, lie about sizes or multiply texts are refused, and quickly."""

import json
import os
import struct
import time

import pytest

from dynamo.core.errors import DynamoError, ModelUnavailable
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.checkpoint.safetensors import SINGLE_FILE
from dynamo.models.checkpoint.weights import open_weights
from dynamo.models.file_cache import MAX_FILE_BYTES, file_ref
from dynamo.models.metadata import metadata_from_folder
from dynamo.models.resolve import resolve_model_blocking
from dynamo.models.tokenization.gguf_tokenizer import convert_tokenizer
from dynamo.models.tokenization.tokenizer import load_tokenizer

DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def entry(shape, offsets, dtype="F32"):
    return json.dumps(
        {"model.embed_tokens.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}
    ).encode()


def write_header(folder, header, data=b""):
    (folder / SINGLE_FILE).write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (DEEP, "not valid"),
        (entry([1] * 100_000, [0, 4]), "100000 dimensions"),
        (entry([1] * 100_000, [0, 4], "F8_E4M3"), "100000 dimensions"),
        (b"{" + b",".join(b'"%d":0' % n for n in range(600_000)) + b"}", "over 524288 tensors"),
    ],
    ids=["nested", "dimensions", "dimensions of an unknown type", "many tensors"],
)
def test_hostile_safetensors_headers_are_refused(model_folder, header, message):
    write_header(model_folder, header, b"\0" * 4)
    with pytest.raises(ModelUnavailable, match=message):
        open_weights(model_folder)


def test_weights_close_although_an_error_refers_to_them(model_folder, write_safetensors, arrays):
    write_safetensors(model_folder / SINGLE_FILE, arrays)
    with open_weights(model_folder) as weights:
        view = memoryview(weights._files._maps[0])  # as in the frames of a traceback
    view.release()


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_nested_json_files_are_refused(model_folder, name):
    (model_folder / name).write_bytes(DEEP)
    with pytest.raises(ModelUnavailable, match=name):
        metadata_from_folder(model_folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "chat_template.jinja"])
def test_files_of_a_terabyte_are_not_read(model_folder, name):
    with (model_folder / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelUnavailable, match=f"at most {MAX_FILE_BYTES}"):
        metadata_from_folder(model_folder)
    with pytest.raises(ModelUnavailable, match=f"at most {MAX_FILE_BYTES}"):
        file_ref(model_folder / name)


def test_named_pipes_are_not_read(model_folder, write_safetensors, arrays):
    write_safetensors(model_folder / SINGLE_FILE, arrays)
    (model_folder / "config.json").unlink()
    os.mkfifo(model_folder / "config.json")
    with pytest.raises(ModelUnavailable, match="not a regular file"):
        open_weights(model_folder)


@pytest.mark.parametrize("size", [10**15, 2**24 + 1])
def test_an_excessive_vocabulary_is_refused(model_folder, size):
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    with pytest.raises(ModelUnavailable, match="vocab_size"):
        resolve_model_blocking(str(model_folder), ensure_verified=False)


def test_an_excessive_number_of_layers_is_refused(model_folder, write_safetensors, arrays):
    write_safetensors(model_folder / SINGLE_FILE, arrays)
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2**31}))
    with pytest.raises(ModelUnavailable, match="2147483648 layers"):
        open_weights(model_folder)


def replace(text, content):
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


@pytest.mark.parametrize(
    "step",
    [
        {"type": "Sequence", "normalizers": [replace("i", "i" * 10)] * 3},
        {"type": "Sequence", "decoders": [replace("i", "i" * 10)] * 3},
        {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 17},
        {"type": "Prepend", "prepend": "x" * 1_000_000},
    ],
    ids=["normalizers", "decoders", "regex", "prepend"],
)
@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_tokenizer_that_multiplies_texts_is_refused(edited_tokenizer, part, step):
    with pytest.raises(ModelUnavailable, match="times as long"):
        load_tokenizer(edited_tokenizer(**{part: step}))


def test_usual_replacements_and_prefixes_are_allowed(edited_tokenizer):
    steps = [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"), replace("ab", "c" * 32)]
    path = edited_tokenizer(normalizer={"type": "Sequence", "normalizers": steps})
    assert load_tokenizer(path).encode("he llo")


def test_prompts_are_neither_padded_nor_cut(edited_tokenizer):
    padding = {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = load_tokenizer(edited_tokenizer(padding=padding, truncation=cut))
    plain = load_tokenizer(edited_tokenizer())
    assert tokenizer.encode("hello world") == plain.encode("hello world")


def gguf(tmp_path, values, body):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, values) + body)
    return path


def string(text):
    return struct.pack("<Q", len(text)) + text


def test_a_gguf_file_of_too_many_values_is_refused_in_time(tmp_path):
    nested = struct.pack("<IQ", 9, 250) + (struct.pack("<IQ", 0, 70_000) + b"\0" * 70_000) * 250
    path = gguf(tmp_path, 1, string(b"a") + struct.pack("<I", 9) + nested)
    started = time.thread_time()
    with pytest.raises(ModelUnavailable, match="over 16777216 values"):
        GgufFile(path)
    assert time.thread_time() - started < 2


@pytest.mark.parametrize(
    "values",
    [
        {"tokenizer.ggml.pre": ["smollm"]},
        {"tokenizer.ggml.model": ["gpt2"]},
        {"tokenizer.ggml.bos_token_id": "1", "tokenizer.ggml.add_bos_token": True},
        {"tokenizer.ggml.merges": ["ab"]},
        {"general.architecture": ["llama"]},
        {"llama.context_length": "many"},
        {"tokenizer.chat_template": 7},
    ],
    ids=str,
)
def test_values_of_other_types_in_gguf_raise_only_typed_errors(write_gguf, values):
    path = write_gguf(values)
    try:
        load_tokenizer(resolve_model_blocking(str(path), ensure_verified=False).tokenizer)
        with open_weights(path):
            pass
        with GgufFile(path) as file:
            convert_tokenizer(file)
    except DynamoError:
        pass
