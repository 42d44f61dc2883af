"""Conversion of the vocabulary in a GGUF file (byte-level BPE, SentencePiece) to a tokenizer.json.

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
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_SPACE = "\u2581"
"""SentencePiece's sign for a space."""
_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEX_OF_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words have combining marks."""
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words are split where capital letters begin, as in GPT-4o."""
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_NUMBERS = r"\p{N}{1,3}"
_DEEPSEEK_V3 = (
    _NUMBERS,
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)


def _split_steps(*patterns: str) -> list[dict[str, Any]]:
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in patterns
    ]
    return [*splits, _BYTE_LEVEL | {"use_regex": False}]


class _PreTokenizer(msgspec.Struct, frozen=True):
    """Pre-tokenization of a model family. `ignore_merges`: known words are not merged."""

    steps: list[dict[str, Any]]
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


PRE_TOKENIZERS = {
    name: pre_tokenizer
    for names, pre_tokenizer in (
        ("gpt-2", _PreTokenizer([_BYTE_LEVEL | {"use_regex": True}])),
        (
            "smollm starcoder refact command-r",
            _PreTokenizer([_DIGITS, _BYTE_LEVEL | {"use_regex": True}]),
        ),
        (
            "llama-bpe llama3 llama-v3 falcon3 pixtral lfm2",
            _PreTokenizer(_split_steps(_REGEX % _NUMBERS), ignore_merges=True, bos=True),
        ),
        ("glm4 chatglm-bpe dbrx", _PreTokenizer(_split_steps(_REGEX % _NUMBERS))),
        ("qwen2 deepseek-r1-qwen", _PreTokenizer(_split_steps(_REGEX % r"\p{N}"), nfc=True)),
        ("qwen35", _PreTokenizer(_split_steps(_REGEX_OF_MARKS), nfc=True)),
        (
            "gpt-4o llama4",
            _PreTokenizer(_split_steps(_CASED_WORDS % (_CONTRACTION, _CONTRACTION, _NUMBERS))),
        ),
        (
            "tekken",
            _PreTokenizer(
                _split_steps(_CASED_WORDS % ("", "", r"\p{N}")), ignore_merges=True, bos=True
            ),
        ),
        ("deepseek-v3", _PreTokenizer(_split_steps(*_DEEPSEEK_V3))),
    )
    for name in names.split()
}


class UnknownVocabulary(ModelUnavailable):
    """A vocabulary in a GGUF file that the conversion does not know."""


def converted_tokenizer_json(file: GgufFile) -> Path:
    """Return the converted tokenizer.json, cached under the hash of the file's metadata.

    Raises `UnknownVocabulary`, and `ModelUnavailable` for a damaged one.
    """
    digest = hashlib.sha256(file.metadata_bytes()).hexdigest()
    path = cache_dir("tokenizers", f"{digest[:32]}-v{CONVERSION_VERSION}") / "tokenizer.json"
    if not path.is_file():
        write_atomically(path, convert_tokenizer(file))
    return path


def convert_tokenizer(file: GgufFile) -> bytes:
    """Return a tokenizer.json for the vocabulary in `file`."""
    kind = file.get("tokenizer.ggml.model", "none")
    name = file.get("tokenizer.ggml.pre", "")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if kind not in ("gpt2", "llama"):
        raise _unsupported_error(file, f"a tokenizer of kind {kind!r}")
    if kind == "gpt2" and pre is None:
        raise _unsupported_error(file, f"the pre-tokenizer {name!r}")
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    kinds = file.get_list("tokenizer.ggml.token_type", int) or [_NORMAL] * len(tokens)
    if not tokens or len(kinds) != len(tokens) or len({*tokens}) != len(tokens):
        raise ModelUnavailable(f"the vocabulary in {file.path.name} is incomplete")
    if kind == "llama":
        return msgspec.json.encode(_sentencepiece_document(file, tokens, kinds))
    assert pre is not None  # noqa: S101 - for mypy
    merges = file.get_list("tokenizer.ggml.merges", str)
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
        "post_processor": _post_processor(file, tokens, adds_bos=pre.bos),
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


def _sentencepiece_document(file: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """Return the tokenizer of a SentencePiece vocabulary, whose scores give the order of merges."""
    scores = file.get_list("tokenizer.ggml.scores", float)
    unknown = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN]
    if len(scores) != len(tokens):
        raise ModelUnavailable(f"the vocabulary in {file.path.name} is incomplete")
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps = [space]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        steps = [{"type": "Prepend", "prepend": _SPACE}, space]
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    added = {_CONTROL, _UNKNOWN, _USER_DEFINED}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(number, token, _CONTROL if kind == _UNKNOWN else kind)
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in added and not (kind == _USER_DEFINED and _SPACE in token)
        ],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _post_processor(file, tokens, adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown[0] if unknown else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": _merges_by_score(tokens, kinds, scores),
        },
    }


def _merges_by_score(
    tokens: list[str], kinds: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Return all pairs of tokens that together are a token, the best first."""
    parts = {
        token: score
        for token, kind, score in zip(tokens, kinds, scores, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    pairs = [
        (-score, token[:cut], token[cut:])
        for token, score in parts.items()
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    ]
    pairs.sort(key=lambda pair: pair[0])
    return [(left, right) for _, left, right in pairs]


def _added_token(number: int, token: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **flags, "special": kind == _CONTROL}


def _post_processor(file: GgufFile, tokens: list[str], *, adds_bos: bool) -> dict[str, Any] | None:
    if not file.get("tokenizer.ggml.add_bos_token", adds_bos):
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
    return UnknownVocabulary(
        f"{file.path.name} has {what}, which is not supported in GGUF files",
        hint="put the model's own tokenizer.json beside the file, or use its Hugging Face folder",
    )
