"""The body of /v1/completions and the template of its answers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from dynamo.application.openai.generation_body import (
    GenerationBody,
    Neutral,
    TokenCount,
    TokenId,
    UnsupportedFields,
    text_options,
)
from dynamo.application.openai.logprobs import completion_logprobs
from dynamo.application.openai.writer import ResponseTemplate
from dynamo.core.codec import pack_ids
from dynamo.core.errors import InvalidRequest, TooLarge, Unsupported
from dynamo.core.text import CompletionRequest, TextOptions

MAX_TOTAL_CHOICES = 2048
MAX_TOTAL_ENTRIES = 1 << 19
"""Each prompt is sent with all entries of `stop_token_ids` and `logit_bias`."""


class CompletionBody(GenerationBody, kw_only=True):
    """OpenAI's completion request."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: TokenCount | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None

    thinking_token_budget: Annotated[Any, Neutral(-1)] = None
    suffix: Annotated[Any, Neutral("")] = None
    prompt_embeds: Annotated[Any, Neutral()] = None
    add_special_tokens: Annotated[Any, Neutral(True)] = None


COMPLETION_DECODER = msgspec.json.Decoder(CompletionBody)
_unsupported = UnsupportedFields(CompletionBody)


def completion_requests(body: CompletionBody, model: str) -> list[CompletionRequest]:
    """Return one processor request for each prompt. Raises `InvalidRequest`, `Unsupported`."""
    _unsupported.check(body)
    options: TextOptions = text_options(body, body.max_tokens, body.logprobs)
    prompts = _split_prompts(body.prompt)
    if len(prompts) * options.n > MAX_TOTAL_CHOICES:
        raise _too_many_prompts(len(prompts), options.n)
    entries = len(options.stop_token_ids) + len(options.sampling.logit_bias or ())
    if len(prompts) * entries > MAX_TOTAL_ENTRIES:
        raise TooLarge(
            f"{len(prompts):,} prompts times {entries:,} entries of stop_token_ids and "
            f"logit_bias, limit {MAX_TOTAL_ENTRIES:,}",
            hint="send fewer prompts in a request",
            field="prompt",
        )
    echo = bool(body.echo)
    if echo and body.logprobs is not None:
        if body.stream:
            raise Unsupported(
                "logprobs of the prompt are not sent in a stream",
                hint="leave stream, echo or logprobs out",
                field="echo",
            )
        top = max(body.logprobs, body.prompt_logprobs or 0)
        options = replace(options, prompt_logprobs=top)
    return [CompletionRequest(model, prompt, options, echo) for prompt in prompts]


def _too_many_prompts(prompts: int, choices: int) -> InvalidRequest:
    return InvalidRequest(
        f"{prompts} prompts times n {choices} exceed {MAX_TOTAL_CHOICES}", field="prompt"
    )


def _split_prompts(prompt: str | list[Any]) -> list[str | bytes]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("at least one is required", field="prompt")
    first, *others = set(map(type, prompt))
    if others:
        raise InvalidRequest(
            "expected str, a list of str, token ids, or lists of token ids", field="prompt"
        )
    if first is int:
        return [pack_ids(prompt)]
    if len(prompt) > MAX_TOTAL_CHOICES:
        raise _too_many_prompts(len(prompt), 1)
    if first is str:
        return prompt
    if [] in prompt:
        raise InvalidRequest("an empty list of token ids", field="prompt")
    return [pack_ids(ids) for ids in prompt]


COMPLETION_RESPONSE = ResponseTemplate(
    id_prefix="cmpl-",
    chunk_object="text_completion",
    response_object="text_completion",
    before_text=b'"text":',
    after_text=b"",
    first_delta=b"",
    empty_delta=b'"text":""',
    make_text_field=lambda text: {"text": text, "prompt_logprobs": None},
    make_logprobs=completion_logprobs,
)
"""The template of completion answers."""
