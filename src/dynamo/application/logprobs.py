"""Logprobs in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo.core.text import TokenText


class TopToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of a chat answer."""

    content: list[ChatToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of a completion: parallel lists, offsets in characters."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


def chat_logprobs(tokens: Sequence[TokenText]) -> ChatLogprobs:
    """One entry a token."""
    return ChatLogprobs(
        [
            ChatToken(
                one.token,
                one.logprob,
                list(one.raw),
                [TopToken(text, logprob, list(raw)) for text, raw, logprob in one.top],
            )
            for one in tokens
        ]
    )


def completion_logprobs(tokens: Sequence[TokenText]) -> CompletionLogprobs:
    """The token itself is among its `top_logprobs`, as one more where it is none of the best."""
    return CompletionLogprobs(
        [one.offset for one in tokens],
        [one.logprob for one in tokens],
        [one.token for one in tokens],
        [
            {text: logprob for text, _, logprob in one.top} | {one.token: one.logprob}
            for one in tokens
        ],
    )
