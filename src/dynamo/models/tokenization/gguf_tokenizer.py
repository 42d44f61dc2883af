"""Conversion of the vocabulary in a GGUF file to a tokenizer.json.

A GGUF file only names its pre-tokenizer, with the names of llama.cpp's `llm_load_vocab`. The
patterns here are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.file_cache import cache_dir, write_atomically

CONVERSION_VERSION = 1
"""Increment it when the conversion changes, so that older converted files are not used."""
_CONTROL, _USER_DEFINED = 3, 4
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_steps(digits: str) -> list[dict[str, Any]]:
    pattern = {"Regex": _REGEX % digits}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return [split, _BYTE_LEVEL | {"use_regex": False}]


class _PreTokenizer(msgspec.Struct, frozen=True):
    """Pre-tokenization of a model family. `ignore_merges`: known words are not merged."""

    steps: list[dict[str, Any]]
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


_GPT2 = _PreTokenizer([_BYTE_LEVEL | {"use_regex": True}])
_SMOLLM = _PreTokenizer([_DIGITS, _BYTE_LEVEL | {"use_regex": True}])
_LLAMA3 = _PreTokenizer(_split_steps(r"\p{N}{1,3}"), ignore_merges=True, bos=True)
_QWEN2 = _PreTokenizer(_split_steps(r"\p{N}"), nfc=True)
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def converted_tokenizer_json(file: GgufFile) -> Path:
    """Return the converted tokenizer.json, cached under the hash of the file's metadata.

    Raises `ModelUnavailable` for an unsupported vocabulary.
    """
    digest = hashlib.sha256(file.metadata_bytes()).hexdigest()
    path = cache_dir("tokenizers", f"{digest[:32]}-v{CONVERSION_VERSION}") / "tokenizer.json"
    if not path.is_file():
        write_atomically(path, convert_tokenizer(file))
    return path


def convert_tokenizer(file: GgufFile) -> bytes:
    """Return a tokenizer.json for the byte-level BPE vocabulary in `file`."""
    kind = file.get("tokenizer.ggml.model", "none")
    if kind != "gpt2":
        raise _unsupported_error(file, f"a tokenizer of kind {kind!r}")
    name = file.get("tokenizer.ggml.pre", "")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise _unsupported_error(file, f"the pre-tokenizer {name!r}")
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    kinds = file.get_list("tokenizer.ggml.token_type", int) or [1] * len(tokens)
    merges = file.get_list("tokenizer.ggml.merges", str)
    if not tokens or len(kinds) != len(tokens) or len({*tokens}) != len(tokens):
        raise ModelUnavailable(f"the vocabulary in {file.path.name} is incomplete")
    return msgspec.json.encode(_tokenizer_document(file, pre, tokens, kinds, merges))


def _tokenizer_document(
    file: GgufFile, pre: _PreTokenizer, tokens: list[str], kinds: list[int], merges: list[str]
) -> dict[str, Any]:
    steps = pre.steps
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(number, token, kind)
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in {_CONTROL, _USER_DEFINED}
        ],
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}
        if len(steps) > 1
        else steps[0],
        "post_processor": _post_processor(file, pre, tokens),
        "decoder": _BYTE_LEVEL | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _added_token(number: int, token: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **flags, "special": kind == _CONTROL}


def _post_processor(file: GgufFile, pre: _PreTokenizer, tokens: list[str]) -> dict[str, Any] | None:
    if not file.get("tokenizer.ggml.add_bos_token", pre.bos):
        return None
    bos_id = file.get("tokenizer.ggml.bos_token_id", -1)
    if not isinstance(bos_id, int) or not 0 <= bos_id < len(tokens):
        return None
    bos = tokens[bos_id]
    special = {"SpecialToken": {"id": bos, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _unsupported_error(file: GgufFile, what: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"{file.path.name} has {what}, which is not supported in GGUF files",
        hint="use the model's Hugging Face folder, which has a tokenizer.json",
    )
