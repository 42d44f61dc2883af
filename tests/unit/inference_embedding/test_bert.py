"""The encoder, against the same computation in float64, one text at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tests.support.tiny_bert import WORDS, reference_vector, write_tiny_bert

from dynamo.core.errors import ModelUnavailable
from dynamo.inference.embedding.bert import cut_vectors, gelu
from dynamo.inference.embedding.server import load_encoder
from dynamo.models.embedding_model import is_embedding_folder, read_embedding_model

TEXTS = [(2, 5, 6, 3), (2, 3), (2, 9, 9, 3), (2, 5, 6, 3), tuple(range(2, 12)), (2, 7, 3)]


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
def test_vectors_equal_the_reference(tmp_path: Path, pooling: str) -> None:
    folder = write_tiny_bert(tmp_path / "model", pooling=pooling, normalised=False)
    vectors = load_encoder(folder, read_embedding_model(folder)).encode(TEXTS)
    expected = np.array([reference_vector(ids, pooling) for ids in TEXTS])
    assert vectors == pytest.approx(expected, abs=1e-4)
    alone = load_encoder(folder, read_embedding_model(folder)).encode(TEXTS[2:3])
    assert alone[0] == pytest.approx(vectors[2], abs=1e-5)


def test_fewer_positions_than_the_context_and_other_modules_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 99}))
    (folder / "sentence_bert_config.json").unlink()
    with pytest.raises(ModelUnavailable, match="64 positions"):
        load_encoder(folder, read_embedding_model(folder))
    (folder / "modules.json").write_text(
        '[{"type": "models.Transformer"}, {"type": "models.Dense"}]'
    )
    with pytest.raises(ModelUnavailable, match="the module Dense is not supported"):
        read_embedding_model(folder)


def test_normalised_vectors_have_length_one(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "model")
    vectors = load_encoder(folder, read_embedding_model(folder)).encode(TEXTS)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-5)
    cut = np.frombuffer(cut_vectors(list(vectors), 5), "<f4").reshape(-1, 5)
    assert np.linalg.norm(cut, axis=1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-5)
    assert cut / cut[:, :1] == pytest.approx(vectors[:, :5] / vectors[:, :1], rel=1e-4)


def test_gelu_is_exact_to_seven_digits() -> None:
    values = np.linspace(-8, 8, 4001, dtype=np.float32)
    expected = [x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in values.astype(float)]
    assert gelu(values.copy()) == pytest.approx(np.array(expected), abs=6e-7)


def test_the_description_is_read_from_the_folder(tmp_path: Path, tiny_model: Path) -> None:
    folder = write_tiny_bert(tmp_path / "model", pooling="cls_token")
    model = read_embedding_model(folder)
    assert (model.pooling, model.normalised, model.context_tokens) == ("cls", True, 16)
    assert model.vocab_size == len(WORDS)
    assert is_embedding_folder(folder)
    assert not is_embedding_folder(tiny_model)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("config.json", {"model_type": "t5"}, "'t5' is no embedding model"),
        ("config.json", {"hidden_size": "many"}, "does not describe a usable model"),
        ("config.json", {"vocab_size": 99}, "configuration says"),
        ("config.json", {"num_hidden_layers": 3}, "has no tensor"),
        ("config.json", {"num_attention_heads": 5}, "cannot be divided by num_attention_heads"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "is not supported"),
    ],
)
def test_a_model_of_another_shape_is_refused(
    tmp_path: Path, file: str, change: dict[str, object], message: str
) -> None:
    folder = write_tiny_bert(tmp_path / "model")
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelUnavailable, match=message):
        load_encoder(folder, read_embedding_model(folder))
