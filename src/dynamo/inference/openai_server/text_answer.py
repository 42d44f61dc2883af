"""An answer of another server as text: chat goes there as chat, and a text prompt as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import Unsupported
from dynamo.core.reply import Reply
from dynamo.core.text import (
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    DecodedTokenLogprob,
    ReasoningDelta,
    TextDelta,
    TextPart,
)
from dynamo.core.values import (
    EngineTotals,
    Feature,
    Finish,
    FinishReason,
    GenerateRequest,
    StructuredOutput,
)
from dynamo.inference.llamacpp.request import MAX_SEED, structure_fields
from dynamo.inference.openai_server.server_facts import Kind, ServerFacts
from dynamo.inference.openai_server.streamed_answer import StreamedAnswer, Usage

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
TEXT_FEATURES: tuple[Feature, ...] = ("logprobs", "structured", "text")
OPENAI_NAMES = frozenset(
    {
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "max_tokens"),
        *("stop", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
    }
)
"""The parameters that any server takes."""
MISSING_NAMES: dict[Kind, frozenset[str]] = {
    "llamacpp": frozenset(
        {
            *("min_tokens", "skip_special_tokens", "include_stop_str_in_output"),
            "thinking_token_budget",
        }
    ),
    "sglang": frozenset({"thinking_token_budget"}),
}


class NamedLogprob(msgspec.Struct):
    """A token's log probability, as chat answers have it."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[NamedLogprob] = []


class TextLogprobs(msgspec.Struct):
    """Log probabilities of a chunk: `content` in chat answers and llama.cpp's, else the others."""

    content: list[NamedLogprob] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class FunctionDelta(msgspec.Struct):
    """A part of a called function."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct):
    """A part of a tool call."""

    index: int = 0
    id: str | None = None
    function: FunctionDelta | None = None


class MessageDelta(msgspec.Struct):
    """A part of a chat answer. Servers give reasoning one of two names."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class TextChoice(msgspec.Struct):
    """A part of a choice: `delta` in chat answers, `text` in others."""

    text: str = ""
    delta: MessageDelta | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: TextLogprobs | None = None


class TextChunk(msgspec.Struct):
    """An event of a streamed answer."""

    choices: list[TextChoice] = []
    usage: Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(TextChunk).decode


def text_features(kind: Kind) -> tuple[Feature, ...]:
    """Return the features of a server of this kind."""
    if kind == "dynamo":  # vLLM reads whitespace_pattern and does not obey it
        return (*TEXT_FEATURES, "whitespace")
    return TEXT_FEATURES


def text_path(request: GenerateRequest) -> str:
    """Return the path of a request in text."""
    return CHAT_PATH if request.text is not None and request.text.chat else COMPLETION_PATH


def text_body(request: GenerateRequest, facts: ServerFacts) -> bytes:
    """Return the body: the caller's conversation or prompt as it is, and the parameters that this
    kind of server has. Raises `Unsupported` for the others."""
    assert request.text is not None  # noqa: S101 - the caller has checked it
    chat, kind = request.text.chat, facts.kind
    body = _parameters(request.text.values, kind, chat=chat)
    if "seed" in body:
        seed = body["seed"] + request.choice
        body["seed"] = seed % MAX_SEED if kind == "llamacpp" else seed
    body |= {"model": facts.model.id, "stream": True, "stream_options": {"include_usage": True}}
    top = request.top_logprobs
    if top is not None:
        body |= {"logprobs": True, "top_logprobs": top} if chat else {"logprobs": top}
    if request.salt and kind == "llamacpp":
        body["cache_prompt"] = False  # its slots are those of all tenants
    elif request.salt and kind != "openai":
        body["cache_salt"] = request.salt
    if request.structured is not None:
        body |= _structure(request.structured, kind)
    prompt = request.token_ids.rstrip(b" ")
    return prompt[:-1] + b"," + msgspec.json.encode(body)[1:]


def _parameters(values: dict[str, Any], kind: Kind, *, chat: bool) -> dict[str, Any]:
    parameters = dict(values)
    template_args = dict(parameters.get("chat_template_kwargs", ()))
    if kind == "openai" and "reasoning_effort" in template_args:
        parameters["reasoning_effort"] = template_args.pop("reasoning_effort")
        parameters["chat_template_kwargs"] = template_args
        if not template_args:
            del parameters["chat_template_kwargs"]
    missing = parameters.keys() & MISSING_NAMES.get(kind, frozenset())
    if kind == "openai":
        missing = parameters.keys() - OPENAI_NAMES
    if missing:
        name = min(missing)
        raise Unsupported(
            f"{name}: the model's server does not know it", hint=f"leave {name} out", param=name
        )
    if kind == "openai" and chat and "max_tokens" in parameters:
        parameters["max_completion_tokens"] = parameters.pop("max_tokens")
    if kind == "llamacpp" and "repetition_penalty" in parameters:
        parameters["repeat_penalty"] = parameters.pop("repetition_penalty")
    elif kind != "llamacpp" and parameters.get("top_k") == 0:
        parameters["top_k"] = -1
    return parameters


def _structure(structured: StructuredOutput, kind: Kind) -> dict[str, Any]:
    """Return the field that gives an answer its form. Raises `Unsupported`."""
    name, value = structured.kind, structured.value
    pattern = structured.whitespace_pattern
    if pattern and name in {"json_object", "json_schema"}:
        form = {"json": msgspec.Raw(value.encode())} if value else {"json_object": True}
        return {"structured_outputs": form | {"whitespace_pattern": pattern}}
    if name == "json_object":
        return {"response_format": {"type": "json_object"}}
    if name == "json_schema":
        schema = {"name": "answer", "schema": msgspec.Raw(value.encode())}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if kind in {"vllm", "dynamo"}:
        parsed = msgspec.Raw(value.encode()) if name == "choice" else value
        return {"structured_outputs": {name: parsed}}
    if kind == "llamacpp":
        return structure_fields(structured)
    raise Unsupported(
        f"the model's server has no {name} for the form of an answer",
        hint="use a JSON schema",
        param="response_format",
    )


class TextAnswer(StreamedAnswer):
    """Delivers the text, the reasoning and the tool calls of one answer."""

    def __init__(self, request: GenerateRequest, reply: Reply, totals: EngineTotals) -> None:
        super().__init__(0, reply, totals, _decode_chunk)
        self._wants_logprobs = request.top_logprobs is not None
        self._calls: set[int] = set()
        self._open_call: int | None = None
        self._has_arguments = False
        self._stop_string = ""

    def _deliver_choice(self, choice: TextChoice) -> bool:
        if isinstance(choice.stop_reason, str):
            self._stop_string = choice.stop_reason
        for part in self._parts(choice):
            self.tokens_delivered += 1
            if not self._reply.text(part):
                return False
        return True

    def _parts(self, choice: TextChoice) -> Iterator[TextPart]:
        delta = choice.delta
        text = choice.text if delta is None else delta.content
        if delta is not None:
            reasoning = delta.reasoning_content or delta.reasoning
            if reasoning:
                yield from self._call_ends()
                yield ReasoningDelta(reasoning)
        if text:
            yield from self._call_ends()
            logprobs = choice.logprobs if self._wants_logprobs else None
            yield TextDelta(text, None if logprobs is None else tuple(_logprobs(logprobs)))
        if delta is not None and delta.tool_calls:
            for call in delta.tool_calls:
                yield from self._call_parts(call)

    def _call_parts(self, call: ToolCallDelta) -> Iterator[TextPart]:
        function = call.function or FunctionDelta()
        if call.index not in self._calls and function.name:
            yield from self._call_ends()
            self._calls.add(call.index)
            self._open_call, self._has_arguments = call.index, False
            yield CallBegun(call.index, call.id or f"call_{call.index}", function.name)
        if function.arguments and call.index == self._open_call:
            self._has_arguments = True
            yield ArgumentsDelta(call.index, function.arguments)

    def _call_ends(self) -> Iterator[TextPart]:
        """Yield the end of the open call, which the next part or the end of the answer tells."""
        if self._open_call is not None:
            call, self._open_call = self._open_call, None
            if not self._has_arguments:
                yield ArgumentsDelta(call, "{}")
            yield CallEnded(call)

    def _finish(self, reason: FinishReason) -> None:
        if reason == "stop":
            for part in self._call_ends():
                if not self._reply.text(part):
                    return
        usage = self._usage
        details = usage.completion_tokens_details
        tokens = usage.completion_tokens or self.tokens_delivered
        self._totals.generated_tokens += tokens
        self._totals.prompt_tokens += usage.prompt_tokens
        self._reply.finish(
            Finish(
                reason,
                tokens,
                cached_tokens=self.cached_tokens,
                stop_string=self._stop_string,
                prompt_tokens=usage.prompt_tokens,
                reasoning_tokens=(details.reasoning_tokens or 0) if details is not None else 0,
            )
        )


def _logprobs(logprobs: TextLogprobs) -> Iterator[DecodedTokenLogprob]:
    for entry in logprobs.content or ():
        top = ((other.token, _raw(other), other.logprob) for other in entry.top_logprobs)
        yield DecodedTokenLogprob(entry.token, _raw(entry), entry.logprob, tuple(top))
    tops: Sequence[dict[str, float] | None] = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    for token, logprob, best in zip(logprobs.tokens, logprobs.token_logprobs, tops, strict=False):
        named = ((text, text.encode(), value) for text, value in (best or {}).items())
        yield DecodedTokenLogprob(token, token.encode(), logprob or 0.0, tuple(named))


def _raw(entry: NamedLogprob) -> bytes:
    return entry.token.encode() if entry.bytes is None else bytes(entry.bytes)
