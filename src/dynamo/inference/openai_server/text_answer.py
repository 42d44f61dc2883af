"""An answer of another server as text: chat goes there as chat, and a text prompt as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.errors import Unsupported
from dynamo.core.reply import Reply
from dynamo.core.text import (
    AnswerEvent,
    ArgumentsDelta,
    DecodedTokenLogprob,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TextPart,
)
from dynamo.core.values import (
    EngineTotals,
    Feature,
    FinishReason,
    GenerateRequest,
    StructuredOutput,
)
from dynamo.inference.engines.parameters import FormTable, Parameter, minus_one_for_none, raw_json
from dynamo.inference.llamacpp.request import FORMS as LLAMACPP_FORMS
from dynamo.inference.llamacpp.request import MAX_SEED
from dynamo.inference.openai_server.completion import FORMS, TITLE
from dynamo.inference.openai_server.foreign_chunk import ForeignChoice, ForeignMessage
from dynamo.inference.openai_server.foreign_values import (
    read_logprob,
    read_object,
    read_objects,
    read_text,
    read_word,
)
from dynamo.inference.openai_server.server_facts import Kind, ServerFacts
from dynamo.inference.openai_server.streamed_answer import ChoiceAnswer
from dynamo.inference.openai_server.tool_calls import CallReader

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
TEXT_FEATURES: tuple[Feature, ...] = ("logprobs", "structured", "text")
DEFAULT_MAX_TOKENS = 1 << 20
"""The length of an answer where neither caller nor server limit it."""
TEXTS = (TextDelta, ReasoningDelta, RefusalDelta)
TEXT_BYTES = 1 << 20
TOKEN_TEXT_BYTES = 256
"""An answer is cut beyond `TEXT_BYTES` characters, and so many more for each of its tokens."""
REASONING_PARTS = 1 << 16
"""Parts of reasoning that do not count as tokens of the answer."""
KNOWN_NAMES = frozenset(
    {
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "max_tokens"),
        *("stop", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
    }
)
"""The parameters that any server takes."""
_MISSING = Parameter("", refused="leave it out")
_NO_BUDGET = {"thinking_token_budget": _MISSING}
_OWN_NAMES = {"top_k": Parameter("top_k", "top_k", minus_one_for_none)}
PARAMETERS: Mapping[Kind, Mapping[str, Parameter]] = {
    "vllm": _OWN_NAMES,
    "dynamo": _OWN_NAMES,
    "sglang": {**_OWN_NAMES, **_NO_BUDGET},
    "llamacpp": {
        **_NO_BUDGET,
        **dict.fromkeys(
            ("min_tokens", "skip_special_tokens", "include_stop_str_in_output"), _MISSING
        ),
        "repetition_penalty": Parameter("repetition_penalty", "repeat_penalty"),
        "seed": Parameter("seed", "seed", lambda seed: seed % MAX_SEED),
    },
    "openai": {},
}
"""The caller's parameters whose name or value differs at a kind of server, or that it lacks."""


def _schema_format(schema: str) -> dict[str, Any]:
    named = {"name": "answer", "schema": raw_json(schema)}
    return {"type": "json_schema", "json_schema": named}


RESPONSE_FORMATS = FormTable(
    TITLE,
    {
        "json_object": ("response_format", lambda _: {"type": "json_object"}),
        "json_schema": ("response_format", _schema_format),
    },
)
"""The structured outputs that any server takes."""


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
    body = _parameters(request.text.values, kind, request.choice, chat=chat)
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


def _parameters(
    values: Mapping[str, Any], kind: Kind, choice: int, *, chat: bool
) -> dict[str, Any]:
    """Return the caller's parameters as this kind of server has them. Raises `Unsupported`."""
    values, rows = dict(values), PARAMETERS[kind]
    if kind == "openai":
        template_args = dict(values.pop("chat_template_kwargs", ()))
        if "reasoning_effort" in template_args:
            values["reasoning_effort"] = template_args.pop("reasoning_effort")
        if template_args:
            values["chat_template_kwargs"] = template_args
        rows = dict.fromkeys(values.keys() - KNOWN_NAMES, _MISSING)
        if chat:
            rows["max_tokens"] = Parameter("max_tokens", "max_completion_tokens")
    if "seed" in values:
        values["seed"] += choice
    parameters = {}
    for name, value in sorted(values.items()):
        row = rows.get(name)
        if row is None:
            parameters[name] = value
        elif row is _MISSING:
            raise Unsupported(f"{TITLE} does not know it", hint=f"leave {name} out", field=name)
        else:
            parameters[row.name] = value if row.convert is None else row.convert(value)
    return parameters


def _structure(structured: StructuredOutput, kind: Kind) -> dict[str, Any]:
    """Return the field that gives an answer its structured output. Raises `Unsupported`."""
    is_json = structured.kind in RESPONSE_FORMATS.rows
    if structured.whitespace_pattern and is_json:
        pattern = {"whitespace_pattern": structured.whitespace_pattern}
        return {"structured_outputs": FORMS.translate(structured) | pattern}
    if kind in {"vllm", "dynamo"} and not is_json:
        return {"structured_outputs": FORMS.translate(structured)}
    has_own = kind == "llamacpp" and not is_json
    return (LLAMACPP_FORMS if has_own else RESPONSE_FORMATS).translate(structured)


class TextAnswer(ChoiceAnswer):
    """Delivers the text, the reasoning, the refusal and the tool calls of one answer."""

    def __init__(
        self,
        request: GenerateRequest,
        context_tokens: int,
        reply: Reply,
        totals: EngineTotals,
        clock: Clock,
    ) -> None:
        values = request.text.values if request.text is not None else {}
        self._is_chat = request.text is not None and request.text.chat
        max_tokens = values.get("max_tokens") or context_tokens or DEFAULT_MAX_TOKENS
        super().__init__(request, reply, totals, clock, max_tokens)
        self._free_bytes = TEXT_BYTES + TOKEN_TEXT_BYTES * max_tokens
        self._free_reasoning_parts = REASONING_PARTS
        self._wants_logprobs = request.top_logprobs is not None
        self._calls = CallReader()
        self._stop_string = ""

    def _deliver_choice(self, choice: ForeignChoice) -> bool:
        if choice.stop_reason:
            self._stop_string = read_word(choice.stop_reason) or self._stop_string
        message = choice.delta or choice.message
        if message is None or not self._is_chat:
            return self._send_text(read_text(choice.text), choice.logprobs)
        # Servers name reasoning in three ways, or make it a part of the content.
        content, refusal = message.content, message.refusal
        reasoning = message.reasoning_content or message.reasoning or message.thinking
        if isinstance(content, list):
            thoughts, refusals, content = _split_content(content)
            reasoning, refusal = reasoning or thoughts, refusal or refusals
        # In the order of an answer. False: the reply wants no more.
        if reasoning and not self._send_reasoning(read_text(reasoning)):
            return False
        if content and not self._send_text(read_text(content), choice.logprobs):
            return False
        if refusal and (text := read_text(refusal)) and not self._send(RefusalDelta(text)):
            return False
        if message.tool_calls or message.function_call:
            return all(map(self._send, self._call_parts(message)))
        return True

    def _send_reasoning(self, text: str) -> bool:
        if self._free_reasoning_parts:
            self._free_reasoning_parts -= 1  # some servers do not count them as tokens
            self._max_parts += 1
        return not text or self._send(ReasoningDelta(text))

    def _send_text(self, text: str, logprobs: Any) -> bool:
        if not text:
            return True
        if logprobs is None or not self._wants_logprobs:
            return self._send(TextDelta(text))
        return self._send(TextDelta(text, tuple(_logprobs(read_object(logprobs)))))

    def _call_parts(self, message: ForeignMessage) -> Iterator[AnswerEvent]:
        for call in read_objects(message.tool_calls):
            yield from self._calls.feed(call)
        if message.function_call and not message.tool_calls:
            yield from self._calls.feed({"function": message.function_call})

    def _send(self, part: TextPart) -> bool:
        """Send a part. Calls end before what is no part of a call. False: the reply has enough."""
        if isinstance(part, TEXTS):
            self._free_bytes -= len(part.text)
            if self._free_bytes < 0:
                return self._cut()
            if self._calls.are_open and not all(map(self._send, self._calls.end())):
                return False
        elif isinstance(part, ArgumentsDelta):
            self._free_bytes -= len(part.text)
        self.tokens += 1
        return self._reply.text(part)

    def _finish(self, reason: FinishReason) -> None:
        for part in self._calls.end() if reason == "stop" else self._calls.cut():
            if not self._reply.text(part):
                return
        usage = self._usage
        tokens = usage.completion_tokens or min(self.tokens, self._max_tokens)
        self._totals.generated_tokens += tokens
        self._totals.prompt_tokens += usage.prompt_tokens
        self.finish(
            reason,
            cached_tokens=self._read_cached_tokens(),
            completion_tokens=tokens,
            stop_string=self._stop_string,
            prompt_tokens=usage.prompt_tokens,
            reasoning_tokens=min(usage.reasoning_tokens, tokens),
        )


def _split_content(parts: list[Any]) -> tuple[str, str, list[Any]]:
    """Return the reasoning and the refusal of a content in parts, and the other parts."""
    groups: dict[str, list[Any]] = {"": []}
    for part in parts:
        kind = read_word(read_object(part).get("type"))
        name = {"thinking": "reasoning", "reasoning": "reasoning", "refusal": "refusal"}.get(kind)
        groups.setdefault(name or "", []).append(part)
    return read_text(groups.get("reasoning")), read_text(groups.get("refusal")), groups[""]


def _logprobs(logprobs: Mapping[str, Any]) -> Iterator[DecodedTokenLogprob]:
    """Yield the log probabilities of a chunk: `content` in chat answers and llama.cpp's, else lists
    of tokens and of numbers. Entries without a token or a number are left out."""
    for entry in read_objects(logprobs.get("content")):
        if (own := _named_logprob(entry)) is not None:
            top = filter(None, map(_named_logprob, read_objects(entry.get("top_logprobs"))))
            yield DecodedTokenLogprob(*own, tuple(top))
    tokens, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if not isinstance(tokens, list) or not isinstance(values, list):
        return
    tops = logprobs.get("top_logprobs")
    tops = tops if isinstance(tops, list) else []
    for token, value, best in zip_longest(tokens, values[: len(tokens)], tops[: len(tokens)]):
        if isinstance(token, str):
            logprobs_by_text = ((text, read_logprob(x)) for text, x in read_object(best).items())
            named = ((text, text.encode(), x) for text, x in logprobs_by_text if x is not None)
            yield DecodedTokenLogprob(
                token, token.encode(), read_logprob(value) or 0.0, tuple(named)
            )


def _named_logprob(entry: Mapping[str, Any]) -> tuple[str, bytes, float] | None:
    token, logprob = entry.get("token"), read_logprob(entry.get("logprob"))
    if not isinstance(token, str) or logprob is None:
        return None
    try:
        raw = bytes(entry["bytes"]) if isinstance(entry.get("bytes"), list) else token.encode()
    except (TypeError, ValueError):
        raw = token.encode()
    return token, raw, logprob
