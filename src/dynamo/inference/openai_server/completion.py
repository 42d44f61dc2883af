"""A completion of another server: the body of its request, and its events as calls of a `Reply`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import Unsupported, WorkerFailed
from dynamo.core.reply import Reply
from dynamo.core.text import REPLACEMENT
from dynamo.core.values import (
    EngineTotals,
    Feature,
    Finish,
    FinishReason,
    GenerateRequest,
    TokenLogprobs,
)
from dynamo.inference.openai_server.server_facts import Kind, ServerFacts
from dynamo.inference.openai_server.streamed_answer import StreamedAnswer, Usage

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


class StreamedLogprobs(msgspec.Struct):
    """Log probabilities of the tokens of a chunk, as completions have them."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class StreamedChoice(msgspec.Struct):
    """A part of the answer. `stop_reason`: the id that ended it, in vLLM."""

    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: StreamedLogprobs | None = None


class Chunk(msgspec.Struct):
    """An event of a streamed completion."""

    choices: list[StreamedChoice] = []
    usage: Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(Chunk).decode


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
        encode: EncodeText | None,
    ) -> None:
        super().__init__(prompt_tokens, reply, totals, _decode_chunk)
        self._top_logprobs = request.top_logprobs
        self._stop_ids = frozenset(request.stops.stop_token_ids)
        self._encode = encode
        self._stop_token: int | None = None
        self._held = ""

    def _deliver_choice(self, choice: StreamedChoice) -> bool:
        if self._encode is not None:
            text = self._held + choice.text
            whole = text.rstrip(REPLACEMENT)  # which may be a character that the end cuts
            self._held = text[len(whole) :]
            ids: Sequence[int] = self._encode(whole) if whole else ()
        else:
            ids = choice.token_ids or ()
            if choice.text and not ids:
                raise WorkerFailed("the server sent text without token ids")
        if ids and choice.finish_reason == "stop" and self._encode is None:
            last = ids[-1]
            if last in self._stop_ids or last == choice.stop_reason:
                ids, self._stop_token = ids[:-1], last
                self.tokens_delivered += 1
        if not ids:
            return True
        self.tokens_delivered += len(ids)
        self._totals.generated_tokens += len(ids)
        if self._top_logprobs is None:
            return self._reply.tokens(ids)
        return self._reply.tokens(ids, _logprobs(choice.logprobs, ids))

    def _finish(self, reason: FinishReason) -> None:
        if self._held and self._encode is not None and reason == "stop":
            self._reply.tokens(self._encode(self._held))
        count = self.tokens_delivered if self._encode is None else self._usage.completion_tokens
        count = count or self.tokens_delivered
        end = Finish(reason, count, self._stop_token, cached_tokens=self.cached_tokens)
        self._reply.finish(end)


def _logprobs(logprobs: StreamedLogprobs | None, ids: Sequence[int]) -> list[TokenLogprobs]:
    if logprobs is None or len(logprobs.token_logprobs) < len(ids):
        raise WorkerFailed("the server sent no log probabilities")
    tops = logprobs.top_logprobs or [None] * len(ids)
    return [
        TokenLogprobs(token, logprob or 0.0, _top(top))
        for token, logprob, top in zip(ids, logprobs.token_logprobs, tops, strict=False)
    ]


def _top(top: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    named = [(name.removeprefix(ID_PREFIX), value) for name, value in (top or {}).items()]
    return tuple((int(name), value) for name, value in named if name.isdecimal())
