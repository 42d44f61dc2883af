"""The JSON of chat and completion answers, as server-sent events or complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.application.http_errors import DONE_EVENT
from dynamo.application.items import (
    AnswerChoice,
    AnswerItem,
    ItemKind,
    ItemWriter,
    TokenLogprobs,
    UsageCounter,
)
from dynamo.application.openai.logprobs import PromptLogprobsOptions, add_prompt_logprobs

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Fields of answers with the model's reasoning; clients read one or the other."""
CUT_REASONS = frozenset({"length", "content_filter"})

_encode = msgspec.json.encode
_UNFINISHED = b',"logprobs":null,"finish_reason":null}]'


class ResponseTemplate(msgspec.Struct, frozen=True):
    """The JSON that differs between the answers of two routes.

    `chunk_object`, `response_object`: the field `object` of an event and of a complete answer.
    `before_text`, `after_text`: JSON around a text in an event. `first_delta`: the delta of the
    event before the first text (b"": there is no such event). `empty_delta`: that of the last one.
    `make_text_field(text)` and `make_logprobs(tokens)` return fields of a choice. The model's
    reasoning is written into each of `reasoning_fields`. Answers with tool calls finish with
    `call_reason`. `service_tier`: repeated unless "". `null_fields`: in a complete answer.
    """

    id_prefix: str
    chunk_object: str
    response_object: str
    before_text: bytes
    after_text: bytes
    first_delta: bytes
    empty_delta: bytes
    make_text_field: Callable[[str], dict[str, Any]]
    make_logprobs: Callable[[TokenLogprobs], Any]
    reasoning_fields: Sequence[str] = REASONING_FIELDS
    call_reason: str = "tool_calls"
    service_tier: str = ""
    null_fields: Mapping[str, None] = {}


class OpenAIWriter(ItemWriter):
    """Writes one answer. All constant parts are encoded once.

    With `include_usage`, a stream ends with the usage, and all other events have a null `usage`.
    """

    interleaves_calls = shows_refusals = True

    def __init__(
        self,
        template: ResponseTemplate,
        request_id: str,
        model: str,
        created: int,
        include_usage: bool = False,
        prompt_logprobs: PromptLogprobsOptions | None = None,
    ) -> None:
        response_id = template.id_prefix + request_id
        self._template = template
        self._response_id, self._created, self._model = response_id, created, model
        self._include_usage = include_usage
        self._prompt_logprobs = prompt_logprobs
        tier = template.service_tier
        self._chunk_start = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,%b"choices":[' % (
            _encode(response_id),
            _encode(template.chunk_object),
            created,
            _encode(model),
            b'"service_tier":%b,' % _encode(tier) if tier else b"",
        )
        self._chunk_end = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def show_usage(self, completion_tokens: int) -> None:
        prompt = self.usage.prompt_tokens
        usage = usage_fields(self.usage) | {
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
        }
        self._chunk_end = b',"usage":%b}\n\n' % _encode(usage)
        for choice in self.choices:
            if choice.current is not None:
                self.begin_item(choice.current)  # its frame has the usage

    def encode_choice_begun(self, choice: int) -> bytes:
        delta = self._template.first_delta
        if not delta:
            return b""
        chunk = b'{"index":%d,%b%b%b%b'
        after = self._template.after_text
        return self._chunk_start + chunk % (choice, delta, after, _UNFINISHED, self._chunk_end)

    def begin_item(self, item: AnswerItem) -> bytes:
        template, kind = self._template, item.kind
        start = self._chunk_start + b'{"index":%d,' % item.choice
        end = _UNFINISHED + self._chunk_end
        if kind == "text":
            item.frame = start + template.before_text, template.after_text + end
        elif kind == "call":
            function = {"name": item.name, "arguments": ""}
            call = {"index": item.call, "id": item.call_id, "type": "function"}
            start += b'"delta":{"tool_calls":['
            before = b'{"index":%d,"function":{"arguments":' % item.call
            item.frame = start + before, b"}}]}" + end
            return start + _encode(call | {"function": function}) + b"]}" + end
        else:
            names = template.reasoning_fields if kind == "reasoning" else ("refusal",)
            first, *others = (b"%b:" % _encode(name) for name in names)
            others = [b"," + name for name in others]
            item.frame = start + b'"delta":{' + first, *others, b"}" + end
        return b""

    def encode_delta(self, item: AnswerItem, delta: str, logprobs: TokenLogprobs) -> bytes:
        template = self._template
        return self._chunk_start + b'{"index":%d,%b%b%b,"logprobs":%b,"finish_reason":null}]%b' % (
            item.choice,
            template.before_text,
            _encode(delta),
            template.after_text,
            _encode(template.make_logprobs(logprobs)),
            self._chunk_end,
        )

    def encode_choice_ended(self, choice: AnswerChoice) -> bytes:
        end = choice.end
        chunk = b'{"index":%d,%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}]%b'
        delta, stop = self._template.empty_delta, _encode(end.stop)
        reason = self._template.call_reason if end.reason == "tool_calls" else end.reason
        return self._chunk_start + chunk % (
            *(choice.index, delta, _encode(reason), stop),
            self._chunk_end,
        )

    def encode_end(self) -> bytes:
        if not self._include_usage:
            return DONE_EVENT
        usage = _encode(usage_fields(self.usage))
        return self._chunk_start + b'],"usage":%b}\n\n' % usage + DONE_EVENT

    def encode_answer(self) -> bytes:
        template = self._template
        tier = {"service_tier": template.service_tier} if template.service_tier else {}
        answer = {
            "id": self._response_id,
            "object": template.response_object,
            "created": self._created,
            "model": self._model,
            **tier,
            "choices": list(map(self._whole_choice, self.choices)),
            "usage": usage_fields(self.usage),
            **template.null_fields,
        }
        if self._prompt_logprobs is not None:
            add_prompt_logprobs(answer, self.choices, self._prompt_logprobs)
        return _encode(answer)

    def _whole_choice(self, choice: AnswerChoice) -> dict[str, Any]:
        end = choice.end
        template, text = self._template, text_of(choice, "text")
        fields = template.make_text_field(text)
        if "message" in fields:
            message = fields["message"]
            message |= message_fields(choice, template.reasoning_fields)
            if "tool_calls" in message or "refusal" in message:
                message["content"] = text or None
        logprobs = [item.logprobs for item in choice.items if item.logprobs is not None]
        tokens = [token for tokens in logprobs for token in tokens]
        return {
            "index": choice.index,
            **fields,
            "logprobs": template.make_logprobs(tokens) if logprobs else None,
            "finish_reason": template.call_reason if end.reason == "tool_calls" else end.reason,
            "stop_reason": end.stop,
        }


def text_of(choice: AnswerChoice, kind: ItemKind) -> str:
    """Return the text of all items of a kind."""
    return "".join(item.text for item in choice.items if item.kind == kind)


def message_fields(choice: AnswerChoice, reasoning_fields: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a whole message besides its text. Of calls without an end, only the last
    one of a cut answer is a call: the others are text, which follows."""
    fields: dict[str, Any] = {}
    if reasoning := text_of(choice, "reasoning"):
        fields = dict.fromkeys(reasoning_fields, reasoning)
    if refusal := text_of(choice, "refusal"):
        fields["refusal"] = refusal
    calls = [item for item in choice.items if item.kind == "call"]
    cut = choice.end.reason in CUT_REASONS
    shown = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.text},
        }
        for call in calls
        if call.complete or (cut and call is calls[-1])
    ]
    return fields | ({"tool_calls": shown} if shown else {})


def usage_fields(usage: UsageCounter) -> dict[str, Any]:
    """Return OpenAI's `usage` object."""
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return fields
