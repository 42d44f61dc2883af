"""Logprobs of answers and prompts, in the formats of OpenAI's chats and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynamo.application.items import AnswerChoice
from dynamo.core.errors import Unsupported
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


def _prompt_logprobs(
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


class PromptLogprobsOptions(msgspec.Struct, frozen=True):
    """The logprobs of a prompt in an answer; None: none.

    - `echo`: this many of each token, before those of the echoed answer
    - `field`: this many of each token in `prompt_logprobs`, which is a field of each choice or of
      the whole response
    """

    echo: int | None = None
    field: int | None = None
    place: Literal["choice", "response"] = "choice"


def add_prompt_logprobs(
    answer: dict[str, Any], choices: Sequence[AnswerChoice], options: PromptLogprobsOptions
) -> None:
    """Add the logprobs of prompts to a whole answer. Raises `Unsupported` where there are none."""
    for fields, choice in zip(answer["choices"], choices, strict=True):
        tokens = choice.prompt
        if tokens is None:
            raise Unsupported(
                "the service that answers has no logprobs of prompts",
                hint="leave it out",
                field="prompt_logprobs",
            )
        if options.echo is not None:
            fields["logprobs"] = _prepend(tokens, options.echo, fields["logprobs"])
        if options.field is not None:
            place = fields if options.place == "choice" else answer
            place["prompt_logprobs"] = _prompt_logprobs(tokens, options.field)


def _prepend(
    prompt: Sequence[DecodedPromptToken], top: int, answer: CompletionLogprobs | None
) -> CompletionLogprobs:
    """Return the logprobs of the prompt and of the answer. The first token has none."""
    first, *rest = prompt
    known = completion_logprobs(
        [
            DecodedTokenLogprob(
                token.token,
                token.raw,
                token.logprob or 0.0,
                tuple((text, raw, logprob) for _, text, raw, logprob in token.top[:top]),
                token.offset,
            )
            for token in rest
        ]
    )
    answer = answer or completion_logprobs(())
    [name] = completion_logprobs([DecodedTokenLogprob(first.token, first.raw, 0.0)]).tokens
    return CompletionLogprobs(
        [first.offset, *known.text_offset, *answer.text_offset],
        [None, *known.token_logprobs, *answer.token_logprobs],
        [name, *known.tokens, *answer.tokens],
        [None, *known.top_logprobs, *answer.top_logprobs],
    )


def _token_string(text: str, raw: bytes) -> str:
    """Return OpenAI's token string: `bytes:\\xf0\\x9f` for bytes that are no valid text."""
    if "\ufffd" not in text or text.encode() == raw:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
