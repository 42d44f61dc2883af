"""Contents of a tokenizer.json: added tokens, token bytes, and whether text may be split."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.file_cache import read_json

_MAX_TOKEN_ID = 1 << 21
_MAX_TEXT_GROWTH = 16
_BYTE_LEVEL_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+"
    r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+"
)
"""The pattern of GPT-2, by which `ByteLevel` splits. `\\s` of a `Split` would match U+180E, too."""
_BYTE_LEVEL_SPLIT = {
    "type": "Split",
    "pattern": {"Regex": _BYTE_LEVEL_PATTERN},
    "behavior": "Isolated",
    "invert": False,
}


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is matched in the text before all other steps."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False

    @property
    def matches_exactly(self) -> bool:
        """Whether the token matches its exact content in any surrounding text."""
        return not (self.single_word or self.lstrip or self.rstrip or self.normalized)


class _TokenizerModel(msgspec.Struct, frozen=True):
    type: str = "BPE"
    vocab: dict[str, int] | list[tuple[str, float]] | None = None
    dropout: float | None = None
    byte_fallback: bool = False


class TokenizerFile(msgspec.Struct, frozen=True):
    """The parts of a tokenizer.json that matter apart from encoding."""

    model: _TokenizerModel
    added_tokens: tuple[AddedToken, ...] = ()
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def read_tokenizer_file(path: Path) -> TokenizerFile:
    """Read a tokenizer.json. Raises `ModelUnavailable`, also for one that multiplies texts."""
    file = read_json(path, TokenizerFile, "a tokenizer.json")
    for steps in (file.normalizer, file.decoder):
        if (growth := _text_growth(steps)) > _MAX_TEXT_GROWTH:
            raise ModelUnavailable(
                f"{path} replaces texts by texts that are {growth:g} times as long",
                hint=f"the factor of all replacements together is at most {_MAX_TEXT_GROWTH}",
            )
    return file


def _text_growth(step: Any) -> float:
    """Return how many times longer the replacements of a normalizer or decoder make a text."""
    if not isinstance(step, dict):
        return 1.0
    nested = step.get("normalizers") or step.get("decoders")
    if isinstance(nested, list):
        return prod(map(_text_growth, nested))
    pattern, content = step.get("pattern"), step.get("content", step.get("prepend"))
    text = pattern.get("String") if isinstance(pattern, dict) else None
    replaced = len(text) if isinstance(text, str) else 1
    return max(1.0, len(content) / max(1, replaced)) if isinstance(content, str) else 1.0


def vocabulary(file: TokenizerFile) -> list[str | None]:
    """Return token strings by id; None for ids without a token."""
    vocab = file.model.vocab or ()
    by_id = (
        {number: text for text, number in vocab.items()}
        if isinstance(vocab, dict)
        else {number: text for number, (text, _) in enumerate(vocab)}  # Unigram: with scores
    )
    by_id.update({token.id: token.content for token in file.added_tokens})
    highest = max(by_id, default=-1)
    if highest > _MAX_TOKEN_ID:
        raise ModelUnavailable(f"the tokenizer has an excessive token id {highest}")
    return [by_id.get(number) for number in range(highest + 1)]


def special_ids(file: TokenizerFile) -> frozenset[int]:
    """Return the ids of tokens that represent no text."""
    return frozenset(token.id for token in file.added_tokens if token.special)


def token_bytes_table(file: TokenizerFile) -> list[bytes | None]:
    """Return the bytes of each token if the decoder is ByteLevel, else None for every id.

    The text of ids is the concatenation of their bytes, decoded as UTF-8 with replacement.
    """
    tokens = vocabulary(file)
    if (file.decoder or {}).get("type") != "ByteLevel":
        return [None] * len(tokens)
    byte_of = {char: number for number, char in enumerate(byte_alphabet())}
    return [None if token is None else _token_bytes(token, byte_of) for token in tokens]


def byte_alphabet() -> str:
    """Return the character of each byte in byte-level BPE (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(number if number in printable else next(others)) for number in range(256))


def can_split_text(file: TokenizerFile) -> bool:
    """Whether text may be split at added tokens and at `segment_cache.SAFE_CUT`.

    Pre-tokenizers of splits, digits and ByteLevel without prefix space have no pre-token from a
    letter into white space, and none that looks back. `verify_encoder` tests each tokenizer.
    """
    return (
        file.model.type == "BPE"
        and not file.model.dropout
        and not file.model.byte_fallback
        and (file.normalizer is None or file.normalizer.get("type") == "NFC")
        and all(token.matches_exactly for token in file.added_tokens)
        and _is_byte_level(file.pre_tokenizer)
    )


def _is_byte_level(pre: dict[str, Any] | None) -> bool:
    if pre is None:
        return False
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    others = {step.get("type") for step in steps} - {"ByteLevel", "Split", "Digits"}
    return len(levels) == 1 and not levels[0].get("add_prefix_space", True) and not others


def _token_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes([byte_of[char] for char in token])
    except KeyError:  # an added token outside the alphabet represents its own text
        return token.encode("utf-8", "replace")


def with_explicit_splits(tokenizer: bytes) -> str:
    """Return a tokenizer.json whose `ByteLevel` has its pattern as a `Split` before it. The ids are
    the same, and `fastokens` has a compiled pattern for a `Split` only: half of the time."""
    document = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
    pre = msgspec.json.decode(document.get("pre_tokenizer", b"null"))
    if pre is not None:
        sequence = {"type": "Sequence", "pretokenizers": _explicit_steps(pre)}
        document["pre_tokenizer"] = msgspec.Raw(msgspec.json.encode(sequence))
    return msgspec.json.encode(document).decode()


def _explicit_steps(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step.get("type") == "Sequence":
        return [part for each in step["pretokenizers"] for part in _explicit_steps(each)]
    splits = step.get("type") == "ByteLevel" and step.get("use_regex", True)
    if splits and not step.get("add_prefix_space", True):
        return [_BYTE_LEVEL_SPLIT, step | {"use_regex": False}]
    return [step]
