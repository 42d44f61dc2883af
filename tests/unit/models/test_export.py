"""`dynamo export`: a GGUF file as a Hugging Face folder."""

import numpy as np

from dynamo.cli import main
from dynamo.models.checkpoint.weights import open_weights
from dynamo.models.resolve import resolve_model_blocking

from .conftest import gguf_model


def test_an_exported_folder_holds_the_same_model(write_gguf, arrays, tmp_path, capsys):
    source = write_gguf()

    assert main(["export", str(tmp_path / "out"), str(source)]) == 0

    assert f"{len(arrays)} tensors" in capsys.readouterr().out
    exported = resolve_model_blocking(str(tmp_path / "out"), ensure_verified=False)
    original = resolve_model_blocking(str(source), ensure_verified=False)
    assert exported.metadata == original.metadata
    with open_weights(source) as a, open_weights(tmp_path / "out") as b:
        assert b.config == a.config
        for name in arrays:
            assert np.array_equal(a.tensor(name), b.tensor(name)), name


def test_the_original_context_of_scaled_frequencies_is_exported(write_gguf, tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    source = write_gguf({f"llama.rope.scaling.{name}": value for name, value in scaling.items()})

    assert main(["export", str(tmp_path / "out"), str(source)]) == 0

    with open_weights(source) as a, open_weights(tmp_path / "out") as b:
        assert a.config.rope_scaling.original_context == 64
        assert b.config == a.config


def test_a_model_of_its_own_rotary_frequencies_is_refused(write_gguf, tmp_path, capsys):
    divisors = (0, (4,), np.full(4, 2.0, np.float32).tobytes())
    source = write_gguf(tensors=gguf_model()[1] | {"rope_freqs.weight": divisors})

    assert main(["export", str(tmp_path / "out"), str(source)]) == 1

    assert "rotary frequencies" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
