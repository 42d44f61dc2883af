"""Tokenizers of GGUF files: the ids of llama.cpp, which reads the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.support.gguf import gguf_bytes
from tests.unit.models.conftest import merges, vocabulary

from dynamo.core.codec import unpack_ids
from dynamo.core.errors import ModelUnavailable
from dynamo.models.resolve import resolve_model_blocking
from dynamo.models.tokenization.tokenizer import load_tokenizer

SPACE = "\u2581"
TEXTS = (
    *("", " ", "  a", "a  b\n\n c", "\t\ttab \r\n\r\n x", "日本語🎉é naïve", "नमस्ते दुनिया"),
    *("don't I'LL we've", "12345 3.14", "HTTPServer camelCase x/y//z\n/", "(a)[b]{c} .d ,e!f"),
    *("<|im_start|>user\nhello the world<|im_end|>\n", "x<|im_end|> <|im_end|>  y"),
)
LLAMA_CPP = """
import json, os, sys, urllib.request
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 256, 1
params.hostnames, params.port, params.api_keys = ["127.0.0.1"], 0, ["key"]
params.verbosity = 1
server = xllamacpp.Server(params)
rows = []
for text in json.load(sys.stdin):
    body = {"content": text, "add_special": False, "parse_special": True}
    request = urllib.request.Request(
        server.listening_address + "/tokenize",
        json.dumps(body).encode(),
        {"authorization": "Bearer key", "content-type": "application/json"},
    )
    rows.append(json.load(urllib.request.urlopen(request))["tokens"])
print(json.dumps(rows), flush=True)
os._exit(0)
"""
WORDS = ("he", "hel", "hell", "hello", "th", "the", "er", "an", "and", "wo", "wor", "worl", "world")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_texts() -> Iterator[str]:
    chance = Random(3)
    letters = [*"abehlortdw C1 \n.é日'/_<>", "hello", " the ", "world"]
    for _ in range(100):
        yield "".join(chance.choice(letters) for _ in range(chance.randrange(1, 30)))


def byte_level_values(name: str) -> dict[str, Any]:
    words = vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3 if number < 3 else 1 for number in range(len(words))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges(words[3:])],
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece_values(*, prefix: bool) -> dict[str, Any]:
    """Return a vocabulary of control tokens, bytes, words and letters, as SentencePiece has it."""
    control = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [SPACE * 2, *WORDS, *(SPACE + word for word in (*WORDS, "w", "t", "a"))]
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyz日é.,"]
    normal = [*words, *letters]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*control, *pieces, *normal],
        "tokenizer.ggml.scores": [
            *[0.0] * (len(control) + len(pieces)),
            *(-float(number) for number in range(len(normal))),
        ],
        "tokenizer.ggml.token_type": [2, *[3] * 4, *[6] * 256, *[1] * len(normal)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def write_model(path: Path, values: Mapping[str, Any]) -> Path:
    """Write a model of one layer whose weights are zeros."""
    sizes = {
        "block_count": 1,
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    model = {"general.architecture": "llama"}
    model |= {f"llama.{name}": value for name, value in sizes.items()}
    rows = len(values["tokenizer.ggml.tokens"])
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (rows, 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}": (32,) for name in ("attn_norm", "ffn_norm")}
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (32, 32) for name in matrices}
    tensors = {
        f"{name}.weight": (0, shape, bytes(4 * prod(shape))) for name, shape in shapes.items()
    }
    path.write_bytes(gguf_bytes({**model, **values}, tensors))
    return path


def llama_cpp_ids(path: Path, texts: list[str]) -> list[list[int]]:
    """Return the ids of llama.cpp's server, which runs in a process of its own: ending a server
    may take for ever."""
    command = [sys.executable, "-c", LLAMA_CPP, str(path)]
    ended = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows: list[list[int]] = json.loads(ended.stdout.splitlines()[-1])
    return rows


@pytest.mark.parametrize(
    "values",
    [
        *(
            pytest.param(byte_level_values(name), id=name)
            for name in ("gpt-2", "smollm", "llama-bpe", "glm4", "qwen2", "qwen35")
        ),
        *(
            pytest.param(byte_level_values(name), id=name)
            for name in ("gpt-4o", "tekken", "deepseek-v3")
        ),
        pytest.param(sentencepiece_values(prefix=True), id="sentencepiece"),
        pytest.param(sentencepiece_values(prefix=False), id="sentencepiece without prefix"),
    ],
)
def test_ids_are_those_of_llama_cpp(tmp_path: Path, values: dict[str, Any]) -> None:
    path = write_model(tmp_path / "model.gguf", values)
    texts = [*TEXTS, *random_texts()]
    files = resolve_model_blocking(str(path), ensure_verified=False)
    tokenizer = load_tokenizer(files.tokenizer)
    expected = llama_cpp_ids(path, texts)
    assert [[*unpack_ids(tokenizer.encode(text))] for text in texts] == expected


def test_a_vocabulary_that_is_not_known_is_read_from_the_file_beside(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", byte_level_values("a-new-one"))
    with pytest.raises(ModelUnavailable, match="pre-tokenizer 'a-new-one'") as refused:
        resolve_model_blocking(str(path), ensure_verified=False)
    assert "tokenizer.json beside" in refused.value.hint
    known = write_model(tmp_path / "known.gguf", byte_level_values("smollm"))
    document = Path(resolve_model_blocking(str(known), ensure_verified=False).tokenizer.path)
    beside = tmp_path / "tokenizer.json"
    beside.write_bytes(document.read_bytes())
    assert resolve_model_blocking(str(path), ensure_verified=False).tokenizer.path == str(beside)
