"""Metadata from a model's files: context, end tokens, chat template, sampling defaults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.file_cache import read_file, read_json
from dynamo.models.tokenization.tokenizer_file import read_tokenizer_file

_DEFAULT_CONTEXT_TOKENS = 4096
_GGUF_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset((
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "< EOT >", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>"),
))  # fmt: skip
"""Texts of tokens that end an answer whatever a GGUF file names, as in llama.cpp."""
_GGUF_TOKENS = {
    "unk_token": "unknown_token_id", "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id", "cls_token": "cls_token_id", "mask_token": "mask_token_id",
}  # fmt: skip
"""Names in templates, and keys of GGUF files (one is spelt so there)."""
_TOOL_TEMPLATE = "tool_use"
"""The name of the template that transformers takes for requests with tools."""


class GenerationDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling defaults of the model's authors. None: not specified."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class ModelMetadata(msgspec.Struct, frozen=True):
    """Metadata of a model."""

    context_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    eos_token_ids: tuple[int, ...] = ()
    bos_token: str = ""
    eos_token: str = ""
    chat_template: str | None = None
    tool_template: str | None = None
    special_tokens: dict[str, str] = {}
    generation: GenerationDefaults = GenerationDefaults()


def metadata_from_gguf(file: GgufFile) -> ModelMetadata:
    """Read the metadata of a GGUF file."""
    kind = file.get("general.architecture", "")
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    vocab_size = file.get(f"{kind}.vocab_size")

    def token_text(key: str) -> str:
        number = file.get(f"tokenizer.ggml.{key}")
        return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else ""

    end_ids = [file.get(f"tokenizer.ggml.{key}") for key in _END_TOKEN_KEYS]
    end_ids += _known_end_ids(tokens)
    values = {
        "context_tokens": file.get(f"{kind}.context_length", _DEFAULT_CONTEXT_TOKENS),
        "vocab_size": max(len(tokens), vocab_size if isinstance(vocab_size, int) else 0),
        "eos_token_ids": _unique_ids(end_ids),
        "bos_token": token_text("bos_token_id"),
        "eos_token": token_text("eos_token_id"),
        "chat_template": file.get("tokenizer.chat_template"),
        "tool_template": file.get(f"tokenizer.chat_template.{_TOOL_TEMPLATE}"),
        "special_tokens": {
            name: text for name, key in _GGUF_TOKENS.items() if (text := token_text(key))
        },
        "generation": {
            name: file.get(f"general.sampling.{key}") for name, key in _GGUF_SAMPLING.items()
        },
    }
    return _build_metadata(values, file.path)


def metadata_from_folder(folder: Path) -> ModelMetadata:
    """Read the metadata files of a Hugging Face folder. Only tokenizer.json is required."""
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config |= text_config
    generation = _read_json(folder / "generation_config.json")
    tokens = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json"), tokens)
    templates = _read_templates(folder, tokens)
    tokenizer = read_tokenizer_file(folder / "tokenizer.json")
    eos = special_tokens.pop("eos_token", "")
    eos_ids = [token.id for token in tokenizer.added_tokens if token.content == eos]
    end_ids = _as_id_list(generation.get("eos_token_id")) or _as_id_list(config.get("eos_token_id"))
    highest = max((token.id for token in tokenizer.added_tokens), default=-1)
    if isinstance(tokenizer.model.vocab, dict):
        highest = max(highest, *tokenizer.model.vocab.values())
    vocab_size = config.get("vocab_size")
    values = {
        "context_tokens": _context_tokens(config, tokens),
        "vocab_size": max(vocab_size if isinstance(vocab_size, int) else 0, highest + 1),
        "eos_token_ids": _unique_ids([*end_ids, *eos_ids]),
        "bos_token": special_tokens.pop("bos_token", ""),
        "eos_token": eos,
        "chat_template": templates.get("default") or next(iter(templates.values()), None),
        "tool_template": templates.get(_TOOL_TEMPLATE),
        "special_tokens": special_tokens,
        "generation": generation,
    }
    return _build_metadata(values, folder)


def _known_end_ids(tokens: list[str]) -> Iterator[int]:
    """Yield the ids of tokens that end an answer by their text. In Harmony's format "<|end|>" ends
    only a message."""
    texts = _END_TEXTS
    if {"<|return|>", "<|call|>", "<|end|>"} <= {*tokens}:
        texts = _END_TEXTS - {"<|end|>"}
    return (number for number, text in enumerate(tokens) if text in texts)


def _build_metadata(values: dict[str, Any], path: Path) -> ModelMetadata:
    try:
        return msgspec.convert(values, ModelMetadata, strict=False)  # accepts 20.0 as an int
    except msgspec.ValidationError as error:
        raise ModelUnavailable(f"{path} does not describe a usable model: {error}") from error


def _context_tokens(config: dict[str, Any], tokens: dict[str, Any]) -> int:
    for length in (config.get("max_position_embeddings"), tokens.get("model_max_length")):
        if isinstance(length, int) and 0 < length < 1 << 30:
            return length
    return _DEFAULT_CONTEXT_TOKENS


def _read_templates(folder: Path, tokens: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates of a folder by name. As in transformers, files come before the
    keys of tokenizer_config.json."""
    templates: dict[str, Any] = {}
    for values in (tokens, _read_json(folder / "chat_template.json")):
        template = values.get("chat_template")
        if isinstance(template, list):
            entries = (entry for entry in template if isinstance(entry, dict))
            templates |= {str(entry.get("name")): entry.get("template") for entry in entries}
        elif template:
            templates["default"] = template
    paths = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    texts = {path.stem: _read_text(path) for path in paths}
    if (path := folder / "chat_template.jinja").is_file():
        texts["default"] = _read_text(path)
    return {name: text for name, text in (templates | texts).items() if isinstance(text, str)}


def _read_text(path: Path) -> str:
    try:
        return read_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error}") from error


def _special_tokens(*files: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that the files name, by name. Later files win."""
    texts: dict[str, str] = {}
    for values in files:
        extra = values.get("extra_special_tokens")
        named = {**extra, **values} if isinstance(extra, dict) else values
        texts |= {
            name: text
            for name, token in named.items()
            if name.endswith("_token") and (text := _token_text(token))
        }
    return texts


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any]) if path.is_file() else {}


def _token_text(token: Any) -> str:
    """Return the text of a token in tokenizer_config.json, which is a string or an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _as_id_list(ids: Any) -> list[int]:
    return [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]


def _unique_ids(ids: Iterable[Any]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and i >= 0))
