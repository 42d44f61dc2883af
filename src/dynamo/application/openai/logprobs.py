"""Logprobs in the formats of OpenAI's chat and completion answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.core.text import DecodedPromptToken, DecodedTokenLogprob


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of a chat answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of a completion: parallel lists; offsets count characters."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def chat_logprobs(tokens: Sequence[DecodedTokenLogprob]) -> ChatLogprobs:
    """Return one entry for each token."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                token.token,
                token.logprob,
                list(token.raw),
                [TopLogprob(text, logprob, list(raw)) for text, raw, logprob in token.top],
            )
            for token in tokens
        ]
    )


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
