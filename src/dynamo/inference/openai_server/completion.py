"""A completion of another server: the body of its request, and its events as calls of a `Reply`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, cast

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.errors import MalformedAnswer, Unsupported
from dynamo.core.reply import Reply
from dynamo.core.text import split_cut_character
from dynamo.core.values import (
    EngineTotals,
    Feature,
    Finish,
    FinishReason,
    GenerateRequest,
    TokenLogprobs,
)
from dynamo.inference.openai_server.foreign_chunk import ForeignChoice
from dynamo.inference.openai_server.foreign_values import (
    MAX_COUNT,
    read_logprob,
    read_object,
    read_word,
)
from dynamo.inference.openai_server.server_facts import Kind, ServerFacts
from dynamo.inference.openai_server.streamed_answer import StreamedAnswer

ID_PREFIX = "token_id:"
"""vLLM's logprobs name tokens so, if asked."""
FEATURES: dict[Kind, tuple[Feature, ...]] = {
    "vllm": ("logprobs", "logit_bias", "structured"),
    "sglang": ("logit_bias",),
    "llamacpp": ("logprobs", "logit_bias", "structured", "extra"),
    "dynamo": ("logit_bias",),
    "openai": ("logit_bias",),
}
GIVES_IDS: frozenset[Kind] = frozenset({"vllm", "sglang"})
EncodeText = Callable[[str], Sequence[int]]


def completion_body(
    request: GenerateRequest, prompt: Sequence[int], facts: ServerFacts
) -> dict[str, Any]:
    """Return the body for a server that is not llama.cpp."""
    sampling, stops, kind = request.sampling, request.stops, facts.kind
    body: dict[str, Any] = {
        "model": facts.model.id,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": stops.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if not sampling.random_seed:
        body["seed"] = (sampling.seed + request.choice) & ((1 << 63) - 1)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if kind == "openai":
        if stops.ignore_eos or stops.min_tokens:
            raise Unsupported(f"{facts.model.id}'s server has no ignore_eos and no min_tokens")
        return body
    body |= {
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": stops.min_tokens,
        "stop_token_ids": stops.stop_token_ids,
        "ignore_eos": stops.ignore_eos,
    }
    if request.salt:
        body["cache_salt"] = request.salt
    if kind in GIVES_IDS:
        body["return_token_ids"] = True
    if request.top_logprobs is not None:
        body |= {"logprobs": request.top_logprobs, "return_tokens_as_token_ids": True}
    if request.structured is not None:
        name, value = request.structured.kind.removesuffix("_schema"), request.structured.value
        parsed = value if name in {"regex", "grammar"} else msgspec.json.decode(value or "true")
        body["structured_outputs"] = {name: parsed}
    return body


class CompletionAnswer(StreamedAnswer):
    """Delivers the tokens of one answer. With `encode`, the server sends text, which is tokenised
    here: the text stands, and `completion_tokens` is the server's count."""

    def __init__(
        self,
        request: GenerateRequest,
        prompt_tokens: int,
        reply: Reply,
        totals: EngineTotals,
        clock: Clock,
        *,
        vocab_size: int,
        encode: EncodeText | None,
    ) -> None:
        super().__init__(prompt_tokens, request.stops.max_tokens, reply, totals, clock)
        self._top_logprobs = request.top_logprobs
        self._stop_ids = frozenset(request.stops.stop_token_ids)
        self._vocab_size = vocab_size or MAX_COUNT
        self._encode = encode
        if encode is None:
            self._max_parts = self._max_tokens
        self._stop_token: int | None = None
        self._held = ""

    def _deliver_choice(self, choice: ForeignChoice) -> bool:
        text = read_word(choice.text)
        if self._encode is not None:
            whole, self._held = split_cut_character(self._held + text)
            ids: Sequence[int] = self._encode(whole) if whole else ()
        else:
            ids = self._read_ids(choice.token_ids)
            if text and not ids:
                raise MalformedAnswer("the server sent text without token ids")
        logprobs: list[TokenLogprobs] | None = None
        if self._top_logprobs is not None and ids:
            logprobs = _logprobs(read_object(choice.logprobs), ids)
        if ids and choice.finish_reason == "stop" and self._encode is None:
            last = ids[-1]
            if last in self._stop_ids or last == choice.stop_reason:
                ids, self._stop_token = ids[:-1], last
                self.tokens_delivered += 1
        if not ids:
            return True
        room = self._max_parts - self.tokens_delivered
        self.tokens_delivered += len(ids)
        if len(ids) > room:
            ids, logprobs = ids[:room], logprobs and logprobs[:room]
        self._totals.generated_tokens += len(ids)
        if not ids:
            return True
        if logprobs is None:
            return self._reply.tokens(ids)
        return self._reply.tokens(ids, logprobs[: len(ids)])

    def _read_ids(self, ids: Any) -> Sequence[int]:
        """Return the ids of tokens. Raises `MalformedAnswer` for what is none of the model."""
        if not ids:
            return ()
        if type(ids) is list and len(ids) == 1:
            (token,) = ids
            if type(token) is int and 0 <= token < self._vocab_size:
                return ids
        try:
            if min(ids) >= 0 and max(ids) < self._vocab_size and set(map(type, ids)) == {int}:
                return cast("Sequence[int]", ids)
        except (TypeError, ValueError):
            pass
        raise MalformedAnswer("the server sent ids of tokens that the model does not have")

    def _finish(self, reason: FinishReason) -> None:
        if self._held and self._encode is not None and reason == "stop":
            self._reply.tokens(self._encode(self._held))
        count = self.tokens_delivered if self._encode is None else self._usage.completion_tokens
        count = min(count or self.tokens_delivered, self._max_tokens)
        end = Finish(reason, count, self._stop_token, cached_tokens=self.cached_tokens)
        self._reply.finish(end)


def _logprobs(logprobs: Mapping[str, Any], ids: Sequence[int]) -> list[TokenLogprobs]:
    values, tops = logprobs.get("token_logprobs"), logprobs.get("top_logprobs")
    if not isinstance(values, list) or len(values) < len(ids):
        raise MalformedAnswer("the server sent no log probabilities")
    if not isinstance(tops, list):
        tops = []
    return [
        TokenLogprobs(token, read_logprob(value) or 0.0, _top(read_object(top)))
        for token, value, top in zip_longest(ids, values[: len(ids)], tops[: len(ids)])
    ]


def _top(top: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    named = ((name.removeprefix(ID_PREFIX), read_logprob(value)) for name, value in top.items())
    return tuple(
        (int(name), value)
        for name, value in named
        if value is not None and name.isdecimal() and len(name) < 10
    )
