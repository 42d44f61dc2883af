"""A completion of another server: the body of its request, and its events as calls of a `Reply`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo.communication.http.client import EventStream, HttpAnswer
from dynamo.core.errors import (
    ContextLengthExceeded,
    DynamoError,
    InvalidRequest,
    Overloaded,
    Unsupported,
    WorkerFailed,
)
from dynamo.core.reply import Reply
from dynamo.core.values import (
    EngineTotals,
    Feature,
    Finish,
    FinishReason,
    GenerateRequest,
    Started,
    TokenLogprobs,
)
from dynamo.inference.openai_server.server_facts import Kind, ServerFacts, excerpt

DONE = b"[DONE]"
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


class PromptDetails(msgspec.Struct):
    """The part of the usage that says what was cached."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Counts of tokens at the end of an answer."""

    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


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
        "seed": (sampling.seed + request.choice) & ((1 << 63) - 1),
    }
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


class CompletionAnswer:
    """Delivers the events of one answer. With `encode`, the server sends text, which is tokenised
    here: the text stands, and `completion_tokens` is the server's count."""

    def __init__(
        self,
        request: GenerateRequest,
        prompt_tokens: int,
        reply: Reply,
        totals: EngineTotals,
        encode: EncodeText | None,
    ) -> None:
        self._top_logprobs = request.top_logprobs
        self._stop_ids = frozenset(request.stops.stop_token_ids)
        self._prompt_tokens = prompt_tokens
        self._reply = reply
        self._totals = totals
        totals.requests += 1
        totals.prompt_tokens += prompt_tokens
        self._encode = encode
        self._events = EventStream()
        self._begun = False
        self.tokens_delivered = 0
        """Tokens that have come so far."""
        self.cached_tokens: int | None = None
        """Prompt tokens from the server's cache; None until it says so at the end."""
        self._usage = Usage()
        self._reason = ""
        self._stop_token: int | None = None
        self.ended = False
        """Whether the reply is finished, or has enough."""

    def on_data(self, part: bytes) -> bool:
        """Deliver a part of the body. False: the answer has ended. Raises `WorkerFailed` for what
        is no event of a completion."""
        for event in self._events.feed(part):
            if event == DONE:
                self._finish()
                return True  # the connection can be used again once the body ends
            try:
                chunk = _decode_chunk(event)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise WorkerFailed(f"the server sent no completion: {excerpt(event)}") from None
            if chunk.error is not None:
                code = chunk.error.get("code") if isinstance(chunk.error, dict) else None
                status = code if isinstance(code, int) and 400 <= code < 600 else 500
                raise map_error(status, msgspec.json.encode(chunk.error), {})
            self._totals.steps += 1
            if not self._deliver(chunk):
                self.ended = True
                return False
        return True

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the server still has to compute, as far as known."""
        return 0 if self.tokens_delivered else self._prompt_tokens

    def begin(self, cached_tokens: int) -> None:
        """Begin the reply, unless it has begun."""
        if not self._begun:
            self._begun = True
            self._reply.begin(Started("", cached_tokens, self._prompt_tokens))

    def _deliver(self, chunk: Chunk) -> bool:
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            self.begin(cached_tokens=0)
            self._reason = choice.finish_reason or self._reason
            if not self._deliver_tokens(choice):
                return False
        return True

    def _deliver_tokens(self, choice: StreamedChoice) -> bool:
        if self._encode is not None:
            ids: Sequence[int] = self._encode(choice.text) if choice.text else ()
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

    def _finish(self) -> None:
        if self.ended:
            return
        if not self._reason:
            raise WorkerFailed("the server ended an answer without a finish_reason")
        if self._reason in {"abort", "error"}:
            raise WorkerFailed(f"the server ended an answer with finish_reason {self._reason!r}")
        self.begin(cached_tokens=0)
        details = self._usage.prompt_tokens_details
        self.cached_tokens = details.cached_tokens if details is not None else None
        self._totals.cached_tokens += self.cached_tokens or 0
        count = self.tokens_delivered if self._encode is None else self._usage.completion_tokens
        self.ended = True
        reason: FinishReason = "length" if self._reason == "length" else "stop"
        self._reply.finish(Finish(reason, count or self.tokens_delivered, self._stop_token))


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


def map_error(status: int, body: bytes, headers: Any) -> DynamoError:
    """Return the error of a server as one of ours. 429 and 503 keep their Retry-After."""
    text = body.decode("utf-8", "replace")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = {}
    error = value.get("error", value) if isinstance(value, dict) else {}
    message, code = text[:300], ""
    if isinstance(error, dict):
        message = str(error.get("message", message))
        code = f"{error.get('code', '')} {error.get('type', '')}"
    if status in {429, 503}:
        retry = headers.get("retry-after", "")
        after = float(retry) if retry.replace(".", "", 1).isdecimal() else None
        return Overloaded(f"the server is overloaded: {message}", retry_after_s=after)
    if status in {400, 413, 422}:
        too_long = "context" in code or "context length" in message or "context size" in message
        return (ContextLengthExceeded if too_long else InvalidRequest)(message)
    return WorkerFailed(f"the server answers {status}: {message}")


def check_answer(answer: HttpAnswer) -> None:
    """Raise the error of an answer that is not 200."""
    if answer.status != 200:
        raise map_error(answer.status, answer.body, answer.headers)
