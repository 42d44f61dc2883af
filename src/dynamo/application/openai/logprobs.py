"""Logprobs in the formats of OpenAI's chat and completion answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.core.text import DecodedPromptToken, DecodedTokenLogprob


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of a completion: parallel lists; offsets count characters."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def chat_logprobs(tokens: Sequence[DecodedTokenLogprob]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat answer."""
    content = [
        _entry(token.token, token.raw, token.logprob)
        | {"top_logprobs": [_entry(*best) for best in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(token: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(raw)}


def completion_logprobs(tokens: Sequence[DecodedTokenLogprob]) -> CompletionLogprobs:
    """Return parallel lists. `top_logprobs` always contains the chosen token itself."""
    names = [_token_string(token.token, token.raw) for token in tokens]
    return CompletionLogprobs(
        [token.offset for token in tokens],
        [token.logprob for token in tokens],
        names,
        [
            {_token_string(text, raw): logprob for text, raw, logprob in token.top}
            | {name: token.logprob}
            for name, token in zip(names, tokens, strict=True)
        ],
    )


def prompt_logprobs_field(
    tokens: Sequence[DecodedPromptToken], top: int
) -> list[dict[int, dict[str, Any]] | None]:
    """Return vLLM's `prompt_logprobs`: the first is null, the others have an object by token id."""
    entries: list[dict[int, dict[str, Any]] | None] = []
    for token in tokens:
        own = {token.token_id: (token.token, token.logprob, token.rank)}
        best = {
            other: (text, logprob, rank)
            for rank, (other, text, _, logprob) in enumerate(token.top[:top], 1)
        }
        entries.append(
            None
            if token.logprob is None
            else {
                token_id: {"logprob": logprob, "rank": rank, "decoded_token": text}
                for token_id, (text, logprob, rank) in (own | best).items()
            }
        )
    return entries


def _token_string(text: str, raw: bytes) -> str:
    """Return OpenAI's token string: `bytes:\\xf0\\x9f` for bytes that are no valid text."""
    if "\ufffd" not in text or text.encode() == raw:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
