"""GGUF files: values, tensors and damaged files."""

from pathlib import Path
from random import Random

import numpy as np
import pytest

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.resolve import resolve_model_blocking


def test_values_and_tensors_are_read(write_gguf, tmp_path):
    extra = {
        "a.flag": True, "a.small": 7, "a.big": -(1 << 40), "a.real": 0.5, "a.text": "é中",
        "a.numbers": [1, 2, 3], "a.texts": ["", "x"], "a.nested": [[1], [2, 3]],
    }  # fmt: skip
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    half = np.array([1.5, -2.0], np.float16)
    path = write_gguf(extra, {"t": (0, (3, 4), array.tobytes()), "h": (1, (2,), half.tobytes())})
    with GgufFile(path) as file:
        assert {key: file.get(key) for key in extra} == extra
        assert file.get("missing", 5) == 5
        assert np.array_equal(file.tensor("t"), array)
        assert file.tensor("h").dtype == np.float32
        assert file.tensor("h").tolist() == [1.5, -2.0]
        with pytest.raises(ModelUnavailable, match="no tensor x"):
            file.tensor("x")


def read_all(path: Path) -> None:
    with GgufFile(path) as file:
        for name in file.tensors:
            file.tensor(name)
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "general.architecture"):
            file.get(key)


def test_truncated_files_are_refused(write_gguf, tmp_path):
    whole = write_gguf().read_bytes()
    chance = Random(1)
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 8, 23, 24, 30, *(chance.randrange(len(whole) - 32) for _ in range(200))]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelUnavailable):
            read_all(cut)


def test_a_damaged_header_raises_only_model_unavailable(write_gguf, tmp_path):
    whole = write_gguf().read_bytes()
    chance = Random(2)
    damaged = tmp_path / "damaged.gguf"
    for _ in range(300):
        raw = bytearray(whole)
        for _ in range(3):
            raw[chance.randrange(6000)] = chance.randrange(256)
        damaged.write_bytes(raw)
        try:
            read_all(damaged)
        except ModelUnavailable:
            continue


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"no model at all, just text", "not a GGUF file"),
        (b"GGUF" + b"\x09\0\0\0" + b"\0" * 32, "version 9"),
    ],
)
def test_files_of_other_formats_are_refused(tmp_path, raw, message):
    path = tmp_path / "other.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelUnavailable, match=message):
        GgufFile(path)


def test_a_block_tensor_needs_dimensions(write_gguf):
    with (
        GgufFile(write_gguf({}, {"t": (3, (), b"\0" * 20)})) as file,
        pytest.raises(ModelUnavailable, match="t has shape"),
    ):
        file.check_tensors()


@pytest.mark.parametrize("kind", [16, 17, 39, 250], ids=str)
def test_a_type_that_only_llamacpp_reads_is_refused_where_weights_are_read(write_gguf, kind):
    path = write_gguf({}, {"t": (kind, (1, 256), b"\0" * 210)})
    files = resolve_model_blocking(str(path), ensure_verified=False)
    assert files.metadata.vocab_size
    with pytest.raises(ModelUnavailable, match=r"are not supported"):
        files.open_weights()
    with GgufFile(path) as file:
        assert file.tensors["t"].kind == kind
        with pytest.raises(ModelUnavailable, match=r"are not supported"):
            file.tensor("t")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelUnavailable, match="cannot be read"):
        GgufFile(tmp_path / "none.gguf")
