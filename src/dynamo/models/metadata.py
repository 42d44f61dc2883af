"""What a model's own files say of it: context, end tokens, template, sampling defaults."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.tokenization.tokenizer_file import read_tokenizer_file

_DEFAULT_CONTEXT_TOKENS = 4096
_END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class GenerationDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a model's makers would have it answer; None: not said."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class ModelMetadata(msgspec.Struct, frozen=True):
    """Read once when the model is resolved."""

    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token: str = ""
    eos_token: str = ""
    chat_template: str | None = None
    generation: GenerationDefaults = GenerationDefaults()


def metadata_from_gguf(file: GgufFile) -> ModelMetadata:
    """From a GGUF file's metadata."""
    kind = file.get("general.architecture", "")
    words = file.get_list("tokenizer.ggml.tokens", str)
    said = file.get(f"{kind}.vocab_size")

    def word(key: str) -> str:
        number = file.get(f"tokenizer.ggml.{key}")
        return words[number] if isinstance(number, int) and 0 <= number < len(words) else ""

    ends = (file.get(f"tokenizer.ggml.{key}") for key in _END_TOKEN_KEYS)
    found = {
        "context_tokens": file.get(f"{kind}.context_length", _DEFAULT_CONTEXT_TOKENS),
        "vocab_size": max(len(words), said if isinstance(said, int) else 0),
        "eos_token_ids": _unique_ids(ends),
        "bos_token": word("bos_token_id"),
        "eos_token": word("eos_token_id"),
        "chat_template": file.get("tokenizer.chat_template"),
    }
    return _build_metadata(found, file.path)


def metadata_from_folder(folder: Path) -> ModelMetadata:
    """From config.json, generation_config.json, tokenizer_config.json and chat_template.jinja;
    each may be missing."""
    config = _read_json(folder / "config.json")
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config |= inner
    generation = _read_json(folder / "generation_config.json")
    tokens = _read_json(folder / "tokenizer_config.json")
    added = read_tokenizer_file(folder / "tokenizer.json")
    eos = _token_text(tokens.get("eos_token"))
    named = [token.id for token in added.added_tokens if token.content == eos]
    ends = _as_id_list(generation.get("eos_token_id")) or _as_id_list(config.get("eos_token_id"))
    highest = max((token.id for token in added.added_tokens), default=-1)
    if isinstance(added.model.vocab, dict):
        highest = max(highest, *added.model.vocab.values())
    said = config.get("vocab_size")
    found = {
        "context_tokens": _context_tokens(config, tokens),
        "vocab_size": max(said if isinstance(said, int) else 0, highest + 1),
        "eos_token_ids": _unique_ids([*ends, *named]),
        "bos_token": _token_text(tokens.get("bos_token")),
        "eos_token": eos,
        "chat_template": _read_chat_template(folder, tokens),
        "generation": generation,
    }
    return _build_metadata(found, folder)


def _build_metadata(found: dict[str, Any], path: Path) -> ModelMetadata:
    try:
        return msgspec.convert(found, ModelMetadata, strict=False)  # 20.0 is a whole number, too
    except msgspec.ValidationError as error:
        raise ModelUnavailable(f"{path} does not describe a usable model: {error}") from error


def _context_tokens(config: dict[str, Any], tokens: dict[str, Any]) -> int:
    for found in (config.get("max_position_embeddings"), tokens.get("model_max_length")):
        if isinstance(found, int) and 0 < found < 1 << 30:
            return found
    return _DEFAULT_CONTEXT_TOKENS


def _read_chat_template(folder: Path, tokens: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelUnavailable(f"{path} cannot be read: {error}") from error
    found = tokens.get("chat_template")
    if isinstance(found, list):  # several by name
        entries = (one for one in found if isinstance(one, dict))
        named = {str(one.get("name")): one.get("template") for one in entries}
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{path} cannot be read: {error}") from error


def _token_text(token: Any) -> str:
    """A token in tokenizer_config.json is its text, or an object with it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _as_id_list(ids: Any) -> list[int]:
    return [one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)]


def _unique_ids(found: Iterable[Any]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(one for one in found if isinstance(one, int) and one >= 0))
