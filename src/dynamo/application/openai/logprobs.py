"""Logprobs in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo.core.text import DecodedTokenLogprob


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
    """`choices[].logprobs` of a completion: parallel lists, offsets in characters."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


def chat_logprobs(tokens: Sequence[DecodedTokenLogprob]) -> ChatLogprobs:
    """One entry a token."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                one.token,
                one.logprob,
                list(one.raw),
                [TopLogprob(text, logprob, list(raw)) for text, raw, logprob in one.top],
            )
            for one in tokens
        ]
    )


def completion_logprobs(tokens: Sequence[DecodedTokenLogprob]) -> CompletionLogprobs:
    """The token itself is among its `top_logprobs`, as one more where it is none of the best."""
    names = [_token_string(one.token, one.raw) for one in tokens]
    return CompletionLogprobs(
        [one.offset for one in tokens],
        [one.logprob for one in tokens],
        names,
        [
            {_token_string(text, raw): logprob for text, raw, logprob in one.top}
            | {name: one.logprob}
            for name, one in zip(names, tokens, strict=True)
        ],
    )


def _token_string(text: str, raw: bytes) -> str:
    """As OpenAI has it: `bytes:\\xf0\\x9f` where bytes alone are no text."""
    if "\ufffd" not in text or text.encode() == raw:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
