"""The answer of a request that asked for the logprobs of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynamo.application.items import AnswerChoice
from dynamo.application.openai.logprobs import (
    CompletionLogprobs,
    completion_logprobs,
    prompt_logprobs_field,
)
from dynamo.core.errors import Unsupported
from dynamo.core.text import DecodedPromptToken, DecodedTokenLogprob


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
            place["prompt_logprobs"] = prompt_logprobs_field(tokens, options.field)


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
